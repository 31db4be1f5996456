"""Calls such as `relu_` on values of their own, and the writes that are not so simple."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lowerdeck.decompose import functionalize
from lowerdeck.torch_base import writes_in_place
from lowerdeck_zoo import Of, exported


def _read_before_and_after(x: Tensor) -> Tensor:
    y = x * 2
    before = y.sum(0)
    return before + y.relu_() + y


def _written_twice(x: Tensor) -> Tensor:
    y = (x + 1).relu_()
    y += x
    return y * 3


def _seen_by_a_view(x: Tensor) -> Tensor:
    y = x * 2
    row = y[0]
    y.relu_()
    return row + 1


def _view_of_the_result(x: Tensor) -> Tensor:
    y = (x * 2).relu_()
    row = y[0]
    y.add_(1)
    return row + y


def _through_a_view(x: Tensor) -> Tensor:
    y = x * 2
    y[0].add_(1)
    return y + 1


def _input(x: Tensor) -> Tensor:
    return x.add_(1) * 2


def _value_and_result(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    return y, y.relu_() + 1


def _other_strides(x: Tensor) -> Tensor:
    return (x * 2).add_((x + 1).t()).contiguous()


def _dropped_out(x: Tensor) -> Tensor:
    y = x * 2
    z = F.dropout(y, training=False)
    y.relu_()
    return z + 1


SIMPLE = [
    *(_read_before_and_after, _written_twice, _value_and_result),
    lambda x: F.hardtanh(x.t() * 2, inplace=True) + 1,
    # The head of timm's MobileNetV4.
    lambda x: F.dropout((x * 2).relu_().flatten(), training=False) + 1,
    lambda x: torch.zeros(4, 4).add_(x) + 1,
]
OTHERS = [
    *(_seen_by_a_view, _view_of_the_result, _through_a_view, _input, _other_strides),
    lambda x: F.hardtanh((x * 2).t(), inplace=True) + 1,
    lambda x: (x * 2).add_(x[0]) + 1,
    # Their variants give truths, or take other arguments.
    *(lambda x: (x * 2).gt_(0.5) - 1, lambda x: (x * 2).logical_not_() - 1),
    lambda x: (x * 2).pow_(2) + 1,
    lambda x: x.int().cumsum_(0) + 1,
]


@pytest.mark.parametrize("function", [*SIMPLE, *OTHERS])
def test_values_are_eagers_and_only_simple_writes_become_functional_calls(
    function: Callable[[Tensor], Any],
) -> None:
    x = torch.randn(4, 4)
    program = exported(Of(function), x)
    names = [node.name for node in program.graph.nodes]
    found = functionalize(program)
    # What is traced gets the names of functional calls.
    assert ([node.name for node in found.graph.nodes] == names) == (function in SIMPLE)
    assert writes_in_place(program.graph_module)
    assert not writes_in_place(found.graph_module)
    found.graph.lint()
    mine, eager = x.clone(), x.clone()
    torch.testing.assert_close(found.module()(mine), function(eager))
    torch.testing.assert_close(mine, eager)


def test_a_dropout_that_returns_its_input_is_another_name() -> None:
    found = functionalize(exported(Of(_dropped_out), torch.ones(2, 2)))
    assert "relu_" not in [node.name for node in found.graph.nodes]


_ARGUMENTS = {"Tensor": torch.full((4, 4), 0.5), "number": 2, "int": 0, "float": 0.5, "bool": True}


def _calls_in_place() -> Iterator[tuple[Any, list[Any]]]:
    """Yield operators that write values in place and draw no numbers, with arguments."""
    others = {torch.Tag.nondeterministic_seeded, torch.Tag.inplace_view}
    for full in torch._C._dispatch_get_all_op_names():
        name, _, overload = full.removeprefix("aten::").partition(".")
        operator = getattr(getattr(torch.ops.aten, name, None), overload or "default", None)
        if not name.endswith("_") or name.startswith("_") or operator is None:
            continue
        if others.intersection(operator.tags):
            continue
        needed = [one for one in operator._schema.arguments if not one.has_default_value()]
        if needed and all(str(one.type) in _ARGUMENTS for one in needed):
            yield operator, [_ARGUMENTS[str(one.type)] for one in needed]


def test_every_operator_that_writes_in_place_has_the_values_of_its_functional_form() -> None:
    count = 0
    for operator, (x, *args) in _calls_in_place():
        function = partial(_in_place, operator, args)
        try:
            wanted = function(x)
            program = functionalize(exported(Of(function), x))
        except Exception:
            continue  # torch refuses these arguments, or to functionalize the call
        found = program.module()(x)
        torch.testing.assert_close(found, wanted, equal_nan=True, msg=str(operator))
        count += 1
    assert count > 100


def _in_place(operator: Any, args: list[Any], x: Tensor) -> Any:
    return operator(x * 1, *args)
