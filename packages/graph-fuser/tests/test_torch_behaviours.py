"""Behaviours that torch's tests of these passes check, in our functions and in torch's.

The programs have the shapes of those tests; what is expected is what torch does when it is run.
"""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch.fx import Node, symbolic_trace
from torch.fx.passes.infra import partitioner as torch_partitioner
from torch.fx.passes.operator_support import OperatorSupport

from lowerdeck.graph_fuser import CapabilityBasedPartitioner

aten = torch.ops.aten
IDLE = ["torch.ops.aten.view", "torch.ops.aten.permute"]


class Adds(OperatorSupport):
    def is_node_supported(self, submodules: Any, node: Node) -> bool:
        known = {operator.add, operator.getitem, aten.view, aten.permute, aten.std_mean}
        return node.op == "call_function" and node.target in known


def blocked_twice(a: Any, b: Any, c: Any) -> Any:
    first = a + b + b
    second = first + c
    third = first + second.relu() + (first + second)
    return third, third.relu() + third + third


def blocked_once(a: Any, b: Any, c: Any) -> Any:
    first = a + b + b
    second = first + (first + first.relu())
    return second, first


def side_by_side(a: Any, b: Any, c: Any) -> Any:
    return a + b, a + c, b + c


def one_branch_is_out(a: Any, b: Any, c: Any) -> Any:
    first = a + 1
    return first.relu(), first + 2


def a_long_branch(a: Any, b: Any, c: Any) -> Any:
    first = a + 1
    return (first + 1) + 1, first + 2


def a_branch_on_a_branch(a: Any, b: Any, c: Any) -> Any:
    first = a + 1
    second = first + 1
    return torch.stack([first + 1, second, first + second])


def crossed(a: Any, b: Any, c: Any) -> Any:
    left, right = a + 1.0, a + 1.5
    return left + right.relu(), left.relu() + right, right + 1.2


def elements(a: Any, b: Any, c: Any) -> Any:
    first, second, _, _ = a.split(1, 0)
    return (first + b) + (second + c)


def one_element(a: Any, b: Any, c: Any) -> Any:
    deviation, _ = aten.std_mean(a)
    return deviation + 1.0


def idle_ends(a: Any, b: Any, c: Any) -> Any:
    value = aten.permute(aten.view(a, [2, 2]), [1, 0]) + 1.0
    value = aten.permute(value, [1, 0]) + 1.0
    return aten.permute(aten.permute(value, [1, 0]), [1, 0])


def idle_middle(a: Any, b: Any, c: Any) -> Any:
    value = aten.permute(aten.view(a - 1.0, [2, 2]), [1, 0]) + 1.0
    value = aten.permute(value, [1, 0]) + 1.0
    return aten.permute(aten.permute(value, [1, 0]), [1, 0]) - 1.0


PROGRAMS = [
    blocked_twice,
    blocked_once,
    side_by_side,
    one_branch_is_out,
    a_long_branch,
    a_branch_on_a_branch,
    crossed,
    elements,
    one_element,
    idle_ends,
    idle_middle,
]


@pytest.mark.parametrize("bookends", [False, True])
@pytest.mark.parametrize("vertical", [False, True])
@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_partitions_are_those_of_torch(
    program: Any, single: bool, vertical: bool, bookends: bool
) -> None:
    found = []
    for kind in (CapabilityBasedPartitioner, torch_partitioner.CapabilityBasedPartitioner):
        gm = symbolic_trace(program)
        maker: Any = kind(
            gm,
            Adds(),
            allows_single_node_partition=single,
            skip_horizontal_fusion=vertical,
            non_compute_ops=IDLE if bookends else None,
        )
        parts = maker.propose_partitions()
        if bookends:
            maker.remove_bookend_non_compute_ops(parts)
        found.append(
            [{node.name: position for node, position in part.nodes.items()} for part in parts]
        )
        fused = maker.fuse_partitions([part for part in parts if part.nodes])
        fused.graph.lint()
        inputs = torch.rand(4), torch.rand(4), torch.rand(4)
        torch.testing.assert_close(fused(*inputs), program(*inputs))
    ours, theirs = found
    assert len(ours) == len(theirs)
    if program is crossed and not vertical:
        # Several answers are right here; what matters is that they can be fused.
        return
    assert ours == theirs
