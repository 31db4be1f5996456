"""Effects of nodes."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch.fx import Graph, symbolic_trace

from lowerdeck.torch_base import Behaviours, Effect, MemoryUse
from lowerdeck_zoo import Of, exported

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
    def chosen(x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda y: y + torch.rand(2), lambda y: y - 1, (x,))

    gm = exported(Of(chosen), torch.ones(2), strict=False).graph_module
    behaviours = Behaviours(gm)
    cond = next(n for n in gm.graph.nodes if n.target is torch.ops.higher_order.cond)
    assert behaviours.effect(cond) & Effect.RANDOM


STATE = [torch.zeros(4), torch.ones(4)]
NORMS = {
    "batch_norm": lambda x, trains: (x, None, None, *STATE, trains, 0.1, 1e-5, False),
    "instance_norm": lambda x, trains: (x, None, None, *STATE, trains, 0.1, 1e-5, False),
    "native_batch_norm": lambda x, trains: (x, None, None, *STATE, trains, 0.1, 1e-5),
    "_batch_norm_impl_index": lambda x, trains: (x, None, None, *STATE, trains, 0.1, 1e-5, False),
}


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("name", NORMS)
def test_norms_write_their_running_statistics_though_their_schemas_hide_it(
    name: str, trains: bool
) -> None:
    x = torch.randn(2, 4, 6)
    target = getattr(aten, name).default
    before = STATE[0].clone()
    target(*NORMS[name](x, trains))
    assert torch.equal(STATE[0], before) != trains, "what torch does"
    graph = Graph()
    nodes = [graph.placeholder(one) for one in ("x", "mean", "var")]
    args = list(NORMS[name](x, trains))
    args[0], args[3], args[4] = nodes
    norm = graph.call_function(target, tuple(args))
    graph.output(norm)
    memory = MemoryUse(graph)
    written = [node.name for node in nodes if memory.writers(node)]
    assert written == (["mean", "var"] if trains else [])
    assert bool(Behaviours(None).effect(norm) & Effect.WRITES) == trains
