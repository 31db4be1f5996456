"""Inlining: every kind of call and result, and nothing half-done."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule, Node, symbolic_trace

from lowerdeck.graph_fuser import RegionError, fuse_partitions, inline_submodule


def calling(inner: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[GraphModule, Node]:
    """Return a graph that calls ``inner`` with its input x in place of None, and the call."""
    root = torch.nn.Module()
    root.add_module("inner", inner)
    graph = Graph()
    x = graph.placeholder("x")
    filled = tuple(x if arg is None else arg for arg in args)
    call = graph.call_module(
        "inner", filled, {k: x if v is None else v for k, v in kwargs.items()}
    )
    graph.output(call)
    return GraphModule(root, graph), call


def test_results_of_every_form() -> None:
    def inner(x: torch.Tensor, y: int = 2) -> dict[str, object]:
        return {"sum": x + y, "same": x, "none": None, "pair": (x.sin(), 3)}

    gm, call = calling(symbolic_trace(inner), None, y=5)
    expected = gm(torch.ones(1))
    inline_submodule(gm, call)
    result = gm(torch.ones(1))
    torch.testing.assert_close(result["sum"], expected["sum"])
    assert result["none"] is None
    assert result["pair"][1] == 3
    assert "inner" not in gm._modules


def test_defaults_are_taken() -> None:
    gm, call = calling(symbolic_trace(lambda x, y=2: x * y), None)
    inline_submodule(gm, call)
    torch.testing.assert_close(gm(torch.ones(1)), torch.full((1,), 2.0))


def test_elements_and_whole_tuples() -> None:
    gm, call = calling(symbolic_trace(lambda x: (x.sin(), x, None, 4)), None)
    output = gm.graph.output_node()
    with gm.graph.inserting_before(output):
        parts = [gm.graph.call_function(operator.getitem, (call, i)) for i in (0, -1, 2)]
    output.args = ((*parts, call),)
    x = torch.ones(1)
    inline_submodule(gm, call)
    first, last, nothing, whole = gm(x)
    torch.testing.assert_close(first, x.sin())
    assert last == 4
    assert nothing is None
    assert whole[1] is x


def test_attributes_of_its_own_are_read_through_the_submodule() -> None:
    class Inner(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(2, 2)
            self.register_buffer("shift", torch.ones(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            moved: torch.Tensor = self.linear(x) + self.get_buffer("shift")
            return moved

    model = Inner()
    gm, call = calling(symbolic_trace(model), None)
    inline_submodule(gm, call)
    targets = [node.target for node in gm.graph.nodes if node.op in {"call_module", "get_attr"}]
    assert targets == ["inner.linear", "inner.shift"]
    x = torch.ones(1, 2)
    torch.testing.assert_close(gm(x), model(x))


def test_shared_attributes_keep_the_parents_names() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    gm = symbolic_trace(model)
    nodes = [node for node in gm.graph.nodes if node.op == "call_module"]
    fused = fuse_partitions(gm, {"p": nodes})["p"]
    inline_submodule(gm, fused.call_node)
    assert [node.target for node in gm.graph.nodes if node.op == "call_module"] == ["0", "1"]
    torch.testing.assert_close(gm(torch.ones(1, 2)), model(torch.ones(1, 2)))


def test_a_submodule_that_is_called_again_stays() -> None:
    gm, call = calling(symbolic_trace(lambda x: x.sin()), None)
    with gm.graph.inserting_before(gm.graph.output_node()):
        again = gm.graph.call_module("inner", (call,))
    gm.graph.output_node().args = (again,)
    inline_submodule(gm, call)
    assert "inner" in gm._modules
    torch.testing.assert_close(gm(torch.ones(1)), torch.ones(1).sin().sin())


def test_what_cannot_be_inlined_is_refused_before_anything_changes() -> None:
    sine = symbolic_trace(lambda x: x.sin())
    cases = [
        (calling(torch.nn.Linear(2, 2), None), "calls a Linear"),
        (calling(sine, None, None), "passes 2 arguments"),
        (calling(sine), "passes 0 arguments"),
    ]
    for (gm, call), message in cases:
        before = str(gm.graph)
        with pytest.raises(RegionError, match=message):
            inline_submodule(gm, call)
        assert str(gm.graph) == before
    other, _ = calling(sine, None)
    with pytest.raises(RegionError):
        inline_submodule(other, call)
    with pytest.raises(RegionError, match="expected a call_module node"):
        inline_submodule(gm, next(iter(gm.graph.nodes)))
