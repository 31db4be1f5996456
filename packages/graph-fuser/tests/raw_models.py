"""Random models as users write them, and the plain graphs that torch.export records of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

Step = Callable[[list[Any], int, int], Any]


def _elements(pool: list[Any], a: int, parts: Any) -> Any:
    """Take one element, write through it, and only then take another."""
    parts[0].add_(1)
    return parts[1] * 2


def _twice(pool: list[Any], a: int, b: int) -> Any:
    first, second = (pool[a] + 1).split(2, 0)
    first.mul_(0.5)
    second.add_(first)
    return torch.cat([second, first])


def _tall(pool: list[Any], a: int, b: int) -> Any:
    parts = (pool[a] * 2).unbind(0)
    first = parts[0].unsqueeze(0)
    first.squeeze_(0)
    return torch.stack([first, parts[1], parts[2], parts[3]])


def _quiet(pool: list[Any], a: int, b: int) -> Any:
    values = (pool[a] + 1).chunk(2, 1)
    with torch.no_grad():
        doubled = values[0] * 2
    return torch.cat([doubled, values[1]], 1)


def _best(pool: list[Any], a: int, b: int) -> Any:
    values, indices = torch.topk(pool[a], 2, dim=-1)
    values.add_(1)
    return torch.zeros_like(pool[a]).scatter(-1, indices, values)


def _set_rows(pool: list[Any], a: int, b: int) -> None:
    pool[a][1:3] = pool[b][0]


def _written(change: Callable[[list[Any], int, int], object]) -> Step:
    def step(pool: list[Any], a: int, b: int) -> None:
        change(pool, a, b)

    return step


STEPS: list[Step] = [
    lambda p, a, b: p[a] + p[b],
    lambda p, a, b: p[a] * 0.5 - p[b],
    lambda p, a, b: p[a].sin(),
    lambda p, a, b: p[a].view(16).view(4, 4),
    lambda p, a, b: p[a].reshape(4, 4),
    lambda p, a, b: p[a].transpose(0, 1),
    lambda p, a, b: p[a].softmax(-1),
    lambda p, a, b: _elements(p, a, (p[a] + 1).split(2)).repeat(2, 1),
    lambda p, a, b: _elements(p, a, p[a].unbind(1)).expand(4, 4),
    lambda p, a, b: _elements(p, a, torch.chunk(p[a].clone(), 4, 1)).expand(4, 4),
    lambda p, a, b: torch.var_mean(p[a], 0, keepdim=True)[1] + p[b],
    lambda p, a, b: p[a].max(1, keepdim=True)[0] + p[b].max(1, keepdim=True)[1],
    _twice,
    _tall,
    _quiet,
    _best,
    _set_rows,
    _written(lambda p, a, b: p[a].add_(1)),
    _written(lambda p, a, b: p[a].copy_(p[b])),
    _written(lambda p, a, b: p[a][0].mul_(0.5)),
    _written(lambda p, a, b: p[a].t_()),
    _written(lambda p, a, b: p[a].clamp_(-2, 2)),
]


class RawModel(torch.nn.Module):
    """Does a few random steps on two inputs and two buffers.

    Args:
        seed: Any number.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        torch.manual_seed(seed)
        self.register_buffer("table", torch.randn(4, 4))
        self.register_buffer("state", torch.randn(4, 4))
        self.steps = [
            (rng.choice(STEPS), rng.random(), rng.random()) for _ in range(rng.randint(4, 14))
        ]
        self.returned = [rng.random() for _ in range(rng.randint(1, 3))]

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        """Return the last result and a few others."""
        # Clones, as an exported graph must not be handed inputs whose shape it changes.
        pool: list[Any] = [x, y, self.table, self.state, x.clone(), y.clone()]
        for step, first, second in self.steps:
            # Mostly what came last, and rarely an input.
            a = len(pool) - 1 - int(first**2 * len(pool))
            made = step(pool, a, int(second * len(pool)))
            if made is not None:
                pool.append(made)
        return (pool[-1], *(pool[int(share * len(pool))] for share in self.returned))


def raw_graph(seed: int) -> GraphModule | None:
    """Return what torch.export records, nothing decomposed; None where it refuses the model."""
    model = RawModel(seed)
    example = (torch.randn(4, 4), torch.randn(4, 4))
    try:
        with torch.no_grad():
            model(*(value.clone() for value in example))
        program = torch.export.export(model, example)
    except (RuntimeError, IndexError, ValueError):
        return None
    gm: GraphModule = program.graph_module
    return gm


def run_raw(gm: GraphModule) -> tuple[list[Tensor], list[Tensor]]:
    """Return the results on fixed inputs, and those inputs afterwards."""
    torch.manual_seed(0)
    inputs = [torch.randn(4, 4) for node in gm.graph.nodes if node.op == "placeholder"]
    with torch.no_grad():
        made = [value.clone() for value in gm(*inputs)]
    return made, inputs
