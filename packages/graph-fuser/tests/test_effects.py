"""The order of nodes that have effects is kept."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.fx import Graph, GraphModule, Node

from lowerdeck.graph_fuser import (
    CycleError,
    fuse_partitions,
    propose_partitions,
    validate_partition,
)
from lowerdeck.graph_fuser.order.hazards import order_hazards

aten = torch.ops.aten


class Earlier(int):
    """An argument: the result of the call of this number."""


def graph_of(*calls: tuple[object, tuple[object, ...]]) -> tuple[GraphModule, list[Node]]:
    """Return a graph of calls; the argument "x" is its input."""
    graph = Graph()
    x = graph.placeholder("x")
    nodes: list[Node] = []
    for target, args in calls:
        filled = tuple(
            x if arg == "x" else nodes[arg] if isinstance(arg, Earlier) else arg for arg in args
        )
        nodes.append(graph.call_function(target, filled))  # type: ignore[arg-type]
    graph.output(tuple(nodes))
    return GraphModule(torch.nn.Module(), graph), nodes


RELU = torch.nn.functional.relu
SIN, COS = (aten.sin.default, ("x",)), (aten.cos.default, ("x",))
DRAWN = (aten.rand.default, ([2],))


@pytest.mark.parametrize(
    ("calls", "pairs"),
    [
        ([SIN, (aten.view.default, ("x", [-1]))], []),
        ([(RELU, ("x",)), (RELU, ("x", True)), SIN], [(0, 1), (1, 2)]),
        ([SIN, (aten.add_.Tensor, ("x", 1)), COS], [(0, 1), (1, 2)]),
        (
            [
                *(SIN, (aten.view.default, ("x", [-1]))),
                *((aten.add_.Tensor, (Earlier(1), 1)), COS),
            ],
            [(0, 2), (2, 3)],
        ),
        ([DRAWN, DRAWN, DRAWN], [(0, 1), (1, 2)]),
        ([SIN, (torch._C._set_grad_enabled, (False,)), COS], [(0, 1), (1, 2)]),
        ([SIN, (aten._assert_async.msg, ("x", "first")), COS], []),
    ],
)
def test_what_has_an_effect_stays_between_its_neighbours(
    calls: list[tuple[object, tuple[object, ...]]], pairs: list[tuple[int, int]]
) -> None:
    gm, nodes = graph_of(*calls)
    found = {*order_hazards(gm.graph, gm)}
    assert {(nodes[a], nodes[b]) for a, b in pairs} <= found
    assert pairs or not found
    ends = [nodes[0], nodes[-1]]
    assert validate_partition(ends) == (not pairs)
    assert validate_partition(nodes)
    if pairs:
        with pytest.raises(CycleError):
            fuse_partitions(gm, {"p": ends})
        between = nodes[pairs[0][1]]
        proposal = propose_partitions(gm, lambda node: node is not between)
        assert not any({*ends} <= {*part} for part in proposal)


def test_two_reads_of_one_attribute_share_its_memory() -> None:
    root = torch.nn.Module()
    root.register_buffer("state", torch.zeros(2))
    graph = Graph()
    first, second = graph.get_attr("state"), graph.get_attr("state")
    sin = graph.call_function(aten.sin.default, (first,))
    write = graph.call_function(aten.add_.Tensor, (second, 1))
    graph.output((sin, write))
    assert (sin, write) in order_hazards(graph, root)


def test_a_fused_module_with_an_effect_survives_dead_code_elimination() -> None:
    gm, (write, sin) = graph_of((aten.add_.Tensor, ("x", 1)), (aten.sin.default, ("x",)))
    gm.graph.output_node().args = (sin,)
    fuse_partitions(gm, {"p": [write]})
    for module in (gm, copy.deepcopy(gm)):
        module.graph.eliminate_dead_code()
        module.recompile()
        torch.testing.assert_close(module(torch.ones(1)), torch.full((1,), 2.0).sin())
