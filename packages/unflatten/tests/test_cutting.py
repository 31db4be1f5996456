"""One call stays one call, whatever passes did to the module stacks of its nodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import export

from lowerdeck.unflatten import unflatten


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Tanh(), nn.Linear(2, 2))

    def forward(self, x: Tensor) -> Any:
        return self.block(x).sigmoid()


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Any:
        return (self.fc(x).relu() @ self.fc.weight).sigmoid()


def test_such_nodes_may_read_state() -> None:
    model, x = nn.Sequential(Reads(), nn.ReLU()), torch.randn(1, 2)
    program = export(model, (x,)).run_decompositions({})
    matmul = next(iter(program.graph.find_nodes(op="call_function", target=_MATMUL)))
    stack = matmul.meta["nn_module_stack"]
    matmul.meta["nn_module_stack"] = dict([next(iter(stack.items()))])
    module = unflatten(program)
    torch.testing.assert_close(module(x), model(x))
    assert [node.target for node in module.graph.find_nodes(op="call_module")] == ["0", "1"]


_MATMUL = torch.ops.aten.matmul.default


@pytest.mark.parametrize("preserved", [(), ("block",)])
def test_nodes_that_lost_their_module_stay_in_the_call_around_them(
    preserved: tuple[str, ...],
) -> None:
    model, x = Outer(), torch.randn(1, 2)
    program = export(model, (x,), preserve_module_call_signature=preserved)
    root = next(iter(program.graph.find_nodes(op="output"))).all_input_nodes[0]
    for node in program.graph.nodes:
        if node.target in {torch.ops.aten.relu.default, torch.ops.aten.tanh.default}:
            # As decomposing an autocast region leaves them.
            node.meta["nn_module_stack"] = dict(root.meta["nn_module_stack"])
    module = unflatten(program)
    torch.testing.assert_close(module(x), model(x))
    assert [node.target for node in module.graph.find_nodes(op="call_module")] == ["block"]
    if preserved:
        other = Outer()
        module.block = other.block
        torch.testing.assert_close(module(x), other(x))
