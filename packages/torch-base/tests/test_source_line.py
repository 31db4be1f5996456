"""Where a node came from, for an error message."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.fx import Graph

from lowerdeck.torch_base import describe_node


def test_a_node_is_told_with_the_innermost_line_outside_torch() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)  # type: ignore[no-any-return]

    program = torch.export.export(Model(), (torch.ones(1, 2),))
    (node,) = program.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    line = next(
        number
        for number, text in enumerate(Path(__file__).read_text().splitlines(), 1)
        if text.strip().startswith("return self.layer(x)")
    )
    place = f"{Path(__file__).name}:{line})"
    assert describe_node(node).startswith("aten.linear.default (node 'linear', from ")
    assert describe_node(node).endswith(place)


def test_a_node_that_nobody_traced_has_no_line() -> None:
    node = Graph().call_function(torch.relu)
    assert "(node 'relu', from an unknown line)" in describe_node(node)
