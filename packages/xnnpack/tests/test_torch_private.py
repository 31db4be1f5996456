"""What we expect of torch's private names."""

from __future__ import annotations

import torch
from torch.export import Dim, export

from lowerdeck.xnnpack import _torch_private as private


class Doubled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x])


def test_what_a_size_can_be_comes_from_the_range_of_the_program() -> None:
    size = Dim("size", min=1, max=9)
    program = export(Doubled(), (torch.rand(5, 4),), dynamic_shapes=({0: size},))
    given = program.graph.find_nodes(op="placeholder")[0].meta["val"].shape
    result = program.graph.output_node().args[0][0].meta["val"].shape
    ranges = program.range_constraints
    assert private.can_be(given[0], 1, ranges)
    assert not private.can_be(given[0], 0, ranges)
    assert not private.can_be(result[0], 1, ranges)
    assert private.can_be(0, 0, ranges)
    assert not private.can_be(given[1], 1, ranges)
