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


def test_a_positional_inplace_is_seen_whatever_came_first() -> None:
    relu = torch.nn.functional.relu
    gm, (_, write, _) = graph_of((relu, ("x",)), (relu, ("x", True)), (torch.sin, ("x",)))
    marked = {node for pair in order_hazards(gm.graph, gm) for node in pair}
    assert write in marked


def test_random_nodes_are_not_fused_past_each_other() -> None:
    gm, (first, _, last) = graph_of(
        (aten.rand.default, ([2],)), (aten.rand.default, ([2],)), (aten.rand.default, ([2],))
    )
    assert not validate_partition([first, last])
    with pytest.raises(CycleError):
        fuse_partitions(gm, {"p": [first, last]})


def test_a_read_before_and_one_after_a_write_do_not_meet() -> None:
    gm, (sin, write, cos) = graph_of(
        (aten.sin.default, ("x",)), (aten.add_.Tensor, ("x", 1)), (aten.cos.default, ("x",))
    )
    assert not validate_partition([sin, cos])
    assert validate_partition([sin, write, cos])
    proposal = propose_partitions(gm, lambda node: node is not write)
    assert proposal.partitions == ((sin,), (cos,))


def test_a_write_through_a_view_counts() -> None:
    gm, (sin, view, _write, cos) = graph_of(
        (aten.sin.default, ("x",)),
        (aten.view.default, ("x", [-1])),
        (aten.add_.Tensor, (Earlier(1), 1)),
        (aten.cos.default, ("x",)),
    )
    assert not validate_partition([sin, cos])
    assert validate_partition([sin, view])
    assert gm is not None


def test_two_reads_of_one_attribute_share_its_memory() -> None:
    root = torch.nn.Module()
    root.register_buffer("state", torch.zeros(2))
    graph = Graph()
    first, second = graph.get_attr("state"), graph.get_attr("state")
    sin = graph.call_function(aten.sin.default, (first,))
    write = graph.call_function(aten.add_.Tensor, (second, 1))
    graph.output((sin, write))
    assert (sin, write) in order_hazards(graph, root)


def test_a_change_of_mode_stays_where_it_is() -> None:
    gm, (sin, _, cos) = graph_of(
        (aten.sin.default, ("x",)),
        (torch._C._set_grad_enabled, (False,)),
        (aten.cos.default, ("x",)),
    )
    assert not validate_partition([sin, cos])
    assert gm is not None


def test_checks_do_not_forbid_fusing() -> None:
    gm, (sin, _, cos, _) = graph_of(
        (aten.sin.default, ("x",)),
        (aten._assert_async.msg, ("x", "first")),
        (aten.cos.default, ("x",)),
        (aten._assert_async.msg, ("x", "second")),
    )
    assert validate_partition([sin, cos])
    assert gm is not None


def test_a_pure_graph_has_no_hazards() -> None:
    gm, _ = graph_of((aten.sin.default, ("x",)), (aten.view.default, ("x", [-1])))
    assert order_hazards(gm.graph, gm) == []


def test_a_fused_module_with_an_effect_survives_dead_code_elimination() -> None:
    gm, (write, sin) = graph_of((aten.add_.Tensor, ("x", 1)), (aten.sin.default, ("x",)))
    gm.graph.output_node().args = (sin,)
    fuse_partitions(gm, {"p": [write]})
    for module in (gm, copy.deepcopy(gm)):
        module.graph.eliminate_dead_code()
        module.recompile()
        torch.testing.assert_close(module(torch.ones(1)), torch.full((1,), 2.0).sin())
