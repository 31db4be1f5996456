"""What has an effect, and that its order is kept."""

from __future__ import annotations

import copy
import operator

import pytest
import torch
from torch.fx import Graph, GraphModule, Node, symbolic_trace

from lowerdeck.graph_fuser import (
    CycleError,
    fuse_partitions,
    propose_partitions,
    validate_partition,
)
from lowerdeck.graph_fuser.hazards import order_hazards
from lowerdeck.torch_base import Behaviours, Effect

aten = torch.ops.aten


def effect_of(target: object, *args: object, **kwargs: object) -> Effect:
    graph = Graph()
    x = graph.placeholder("x")
    filled = tuple(x if arg is None else arg for arg in args)
    if isinstance(target, str):
        node = graph.call_method(target, filled, kwargs)  # type: ignore[arg-type]
    else:
        node = graph.call_function(target, filled, kwargs)  # type: ignore[arg-type]
    return Behaviours(None).effect(node)


@pytest.mark.parametrize(
    ("target", "args", "effect"),
    [
        (aten.add.Tensor, (None, 1), Effect.NONE),
        (aten.add_.Tensor, (None, 1), Effect.WRITES),
        (aten.add.out, (None, 1), Effect.WRITES),
        (aten.rand.default, ([2],), Effect.RANDOM),
        (aten.bernoulli_.float, (None,), Effect.WRITES | Effect.RANDOM),
        (aten._assert_scalar.default, (None, "message"), Effect.CHECK),
        (aten.sym_constrain_range.default, (None,), Effect.CHECK),
        (torch._C._set_grad_enabled, (False,), Effect.MODE),
        (torch.rand, (2,), Effect.RANDOM),
        (torch.randn_like, (None,), Effect.RANDOM),
        (torch.nn.functional.dropout, (None,), Effect.RANDOM),
        (torch.add, (None, 1), Effect.NONE),
        (torch.relu_, (None,), Effect.WRITES),
        (operator.add, (None, 1), Effect.NONE),
        (operator.iadd, (None, 1), Effect.WRITES),
        (operator.setitem, (None, 0, 1), Effect.WRITES),
        (operator.getitem, (None, 0), Effect.NONE),
        ("add_", (None, 1), Effect.WRITES),
        ("add", (None, 1), Effect.NONE),
        ("normal_", (None,), Effect.WRITES | Effect.RANDOM),
        ("made_up_", (None,), Effect.WRITES),
        ("made_up", (None,), Effect.NONE),
        (print, (None,), Effect.NONE),
    ],
)
def test_what_a_call_does(target: object, args: tuple[object, ...], effect: Effect) -> None:
    assert effect_of(target, *args) == effect


def test_inplace_and_out_keywords_write() -> None:
    assert effect_of(torch.nn.functional.relu, None, inplace=True) == Effect.WRITES
    assert effect_of(torch.nn.functional.relu, None, inplace=False) == Effect.NONE
    assert effect_of(torch.nn.functional.relu, None, True) == Effect.WRITES
    assert effect_of(torch.nn.functional.leaky_relu, None, 0.1, False) == Effect.NONE
    assert effect_of(torch.exp, None, out=None) == Effect.NONE


def test_a_positional_inplace_is_seen_whatever_came_first() -> None:
    relu = torch.nn.functional.relu
    gm, (_, write, _) = graph_of((relu, ("x",)), (relu, ("x", True)), (torch.sin, ("x",)))
    marked = {node for pair in order_hazards(gm.graph, gm) for node in pair}
    assert write in marked


@pytest.mark.parametrize(
    ("module", "effect"),
    [
        (torch.nn.Linear(2, 2), Effect.NONE),
        (torch.nn.ReLU(inplace=True), Effect.WRITES),
        (torch.nn.Sequential(torch.nn.Dropout()), Effect.RANDOM),
        (torch.nn.Dropout().eval(), Effect.NONE),
        (torch.nn.BatchNorm1d(2), Effect.EFFECT),
        (torch.nn.BatchNorm1d(2).eval(), Effect.NONE),
        (torch.nn.LSTM(2, 2, num_layers=2, dropout=0.5), Effect.RANDOM),
        (symbolic_trace(lambda x: x.add_(1)), Effect.WRITES),
    ],
)
def test_what_a_module_does(module: torch.nn.Module, effect: Effect) -> None:
    root = torch.nn.Module()
    root.add_module("inner", module)
    graph = Graph()
    node = graph.create_node("call_module", "inner", (graph.placeholder("x"),))
    assert Behaviours(root).effect(node) == effect


def test_a_higher_order_operator_does_what_its_graphs_do() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            chosen: torch.Tensor = torch.cond(
                x.sum() > 0, lambda y: y + torch.rand(2), lambda y: y - 1, (x,)
            )
            return chosen

    program = torch.export.export(Model(), (torch.ones(2),), strict=False)
    gm = program.graph_module
    behaviours = Behaviours(gm)
    cond = next(n for n in gm.graph.nodes if n.target is torch.ops.higher_order.cond)
    assert behaviours.effect(cond) & Effect.RANDOM


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
