"""What every pass asks of every call is answered without work that was done before."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lowerdeck.emitter.ir import graph
from lowerdeck.emitter.ir.graph import Call, substitute, values_in
from lowerdeck.emitter.ir.values import TensorValue
from lowerdeck.torch_base import schema_of


def tensor(name: str, *shape: Any) -> TensorValue:
    return TensorValue(name, torch.float32, shape, (1,) * len(shape), tuple(range(len(shape))))


def python_calls(action: Callable[[], object]) -> int:
    count = 0

    def profile(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


def test_items_of_a_list_cost_no_call_each() -> None:
    one, two = tensor("one", 2), tensor("two", 2)
    few: list[Any] = [one, [two, 1]]
    many: list[Any] = [one, *range(100), [two, *range(100)], None, "text"]
    assert list(values_in(many)) == [one, two]
    assert substitute(many, {two: one})[101][0] is one

    def read(given: list[Any]) -> int:
        return python_calls(lambda: list(values_in(given)))

    def exchanged(given: list[Any]) -> int:
        return python_calls(lambda: substitute(given, {}))

    assert read(many) <= read(few) + 2
    assert exchanged(many) <= exchanged(few) + 2


def test_an_operator_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def counted(operator: Any) -> Any:
        asked.append(operator)
        return schema_of(operator)

    monkeypatch.setattr(graph, "_OPERATORS", {})
    monkeypatch.setattr("lowerdeck.emitter.ir.graph.schema_of", counted)
    add, sub = torch.ops.aten.add.Tensor, torch.ops.aten.sub.Tensor
    names = [Call(target, [], [], None).op_name for target in (add, sub, add, sub)]
    assert names == ["add", "sub"] * 2
    assert asked == [add, sub]


def test_sizes_that_vary_are_seen_among_fixed_ones() -> None:
    exported = torch.export.export(
        torch.nn.ReLU(),
        (torch.zeros(3, 4),),
        dynamic_shapes=({0: torch.export.Dim("rows", max=8)},),
    )
    (x,) = exported.graph.find_nodes(op="placeholder")
    assert tensor("varies", *x.meta["val"].shape).dynamic
    assert not tensor("fixed", 3, 4).dynamic
    assert not tensor("scalar").dynamic
