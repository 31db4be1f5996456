"""Calls such as `relu_` on values of their own, and the writes that are not so simple."""

from __future__ import annotations

from collections.abc import Callable
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
    lambda x: torch.zeros(4, 4).add_(x) + 1,
]
OTHERS = [
    *(_seen_by_a_view, _view_of_the_result, _through_a_view, _input, _other_strides),
    lambda x: F.hardtanh((x * 2).t(), inplace=True) + 1,
    lambda x: (x * 2).add_(x[0]) + 1,
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
