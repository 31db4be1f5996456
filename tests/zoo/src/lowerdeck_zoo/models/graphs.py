"""Networks on graphs, and chains of decisions."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  (the name that everyone knows)
from torch import nn
from torch.export import Dim

from lowerdeck_zoo.program import Holding, Of, Program, drawn, normal


class GraphConv(Holding, own=lambda: nn.Linear(5, 8), other=lambda: nn.Linear(5, 8)):
    """Messages along edges, added and divided by the number of neighbours."""

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges
        total = torch.zeros_like(x).index_add(0, target, x[source])
        count = torch.zeros(x.shape[0]).index_add(0, target, torch.ones(edges.shape[1]))
        return F.relu(self.own(x) + self.other(total / count.clamp(min=1).unsqueeze(1)))


class GraphAttention(nn.Module):
    """Softmax over the edges into each node: a maximum and a sum by scattering."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = nn.Linear(5, 6), nn.Linear(6, 1), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges
        h = self.body(x)
        scores = F.leaky_relu(self.left(h)[source] + self.right(h)[target], 0.2).squeeze(1)
        nodes = torch.zeros(x.shape[0])
        highest = nodes.scatter_reduce(0, target, scores, "amax", include_self=False)
        weights = torch.exp(scores - highest[target])
        weights = weights / nodes.scatter_add(0, target, weights)[target]
        index = target.unsqueeze(1).expand(-1, h.shape[1])
        return torch.zeros_like(h).scatter_add(0, index, weights.unsqueeze(1) * h[source])


class GraphPool(nn.Module):
    """The largest, smallest and mean feature of each graph of a batch."""

    def forward(self, x: torch.Tensor, graph: torch.Tensor) -> torch.Tensor:
        index = graph.unsqueeze(1).expand_as(x)
        start = torch.zeros(3, x.shape[1])
        kinds = ("amax", "amin", "mean")
        return torch.cat(
            [start.scatter_reduce(0, index, x, kind, include_self=False) for kind in kinds], 1
        )


def _beam(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The three best sequences, step by step."""
    best, sequences = scores[0].topk(3)
    sequences = sequences.unsqueeze(1)
    for step in range(1, scores.shape[0]):
        joined = (best.unsqueeze(1) + scores[step]).flatten()
        best, place = joined.topk(3)
        origin, symbol = place // scores.shape[1], place % scores.shape[1]
        sequences = torch.cat([sequences[origin], symbol.unsqueeze(1)], 1)
    return sequences, best


class Recommender(nn.Module):
    """Bags of categories, numbers, and products of all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(20, 6, mode=m) for m in ("sum", "mean", "max"))
        self.bottom, self.top = nn.Linear(4, 6), nn.Linear(6 + 6, 1)

    def forward(self, dense: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor):
        parts = [F.relu(self.bottom(dense))] + [table(rows, starts) for table in self.tables]
        stacked = torch.stack(parts, 1)
        pairs = stacked @ stacked.transpose(1, 2)
        row, column = torch.tril_indices(4, 4, -1)
        return torch.sigmoid(self.top(torch.cat([parts[0], pairs[:, row, column]], 1)))


def _graph(nodes: int = 6, edges: int = 11):
    return torch.randn(nodes, 5), torch.randint(0, nodes, (2, edges))


def _bags():
    return torch.randn(3, 4), torch.randint(0, 20, (8,)), torch.tensor([0, 3, 5])


PROGRAMS = (
    Program(
        "graph_conv",
        GraphConv,
        lambda: [_graph(n, e) for n, e in ((6, 11), (4, 5), (9, 20))],
        ({0: Dim("nodes", min=2, max=9)}, {1: Dim("edges", min=2, max=20)}),
        tags="dynamic",
    ),
    Program("graph_attention", GraphAttention, drawn(_graph)),
    Program(
        "graph_pool",
        GraphPool,
        drawn(lambda: (torch.randn(7, 4), torch.tensor([0, 0, 2, 2, 2, 0, 2]))),
    ),
    Program("beam_search", lambda: Of(_beam), normal(5, 7)),
    Program("recommender", Recommender, drawn(_bags)),
)
