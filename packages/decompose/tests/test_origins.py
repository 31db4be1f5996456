"""What nodes know of where they come from,."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lowerdeck.decompose import decompose

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

ATEN = torch.ops.aten
FIELDS = ("stack_trace", "nn_module_stack", "torch_fn")


class Inner(nn.Module):
    cache: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache[:, 1:3] = x
        self.cache.t()[0].mul_(2)
        return x + 1


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: torch.Tensor, given: torch.Tensor) -> Any:
        y = self.inner(x) * 2
        y.view(-1)[1:].neg_()
        given[0].add_(1)
        return y.relu(), y


def test_what_a_write_becomes_knows_by_what_it_was_written() -> None:
    program = torch.export.export(Outer(), (torch.ones(4, 2), torch.ones(2, 2)))
    ours, theirs = decompose(program), program.run_decompositions()
    for node in ours.graph.nodes:
        if node.op != "call_function":
            continue
        assert all(node.meta.get(field) for field in FIELDS), node
        assert node.meta.get("from_node"), node
    for target in (ATEN.slice_scatter.default, ATEN.where.self, ATEN.relu.default):
        found, expected = (
            [
                (*(node.meta[field] for field in FIELDS), node.meta["from_node"][0].name)
                for node in each.graph.nodes
                if node.target is target
            ]
            for each in (ours, theirs)
        )
        assert found
        assert sorted(map(str, found)) == sorted(map(str, expected))
