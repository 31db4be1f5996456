"""Rows that are quantised at run time and read by more than layers of integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from case_making import Function  # type: ignore[import-not-found]
from quantized_cases import IntegerWeight, by_row, qd  # type: ignore[import-not-found]
from torch import Tensor
from xnnpack_lowering import lower  # type: ignore[import-not-found]

from lowerdeck.emitter import emit
from lowerdeck.runner import load
from lowerdeck.xnnpack import XnnpackPartitioner
from lowerdeck.xnnpack.operators import rounding

OTHERS: dict[str, Callable[..., Any]] = {
    "two activations": lambda x, y, w: by_row(x) @ by_row(y).mT,
    "the second of two": lambda x, y, w: x @ by_row(y).mT,
    "a sum": lambda x, y, w: by_row(x) + y,
    "a layer of floats": lambda x, y, w: F.linear(by_row(x), y),
    "a layer and a sum": lambda x, y, w: (F.linear(rows := by_row(x), w()), rows.exp()),
    "its own weight": lambda x, y, w: F.linear(rows := by_row(x), rows),
    "a result": lambda x, y, w: by_row(x),
    "past a view": lambda x, y, w: by_row(x).view(1, 3, 16).relu(),
    "views of other rows": lambda x, y, w: F.linear(by_row(x).view(6, 8), w()[:, :8]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_read_by_others_is_rounded_outside(name: str) -> None:
    torch.manual_seed(0)
    partitioner = XnnpackPartitioner()
    inputs = torch.randn(3, 16), torch.randn(3, 16)
    lower(Function(OTHERS[name], IntegerWeight(5, 16)), inputs, partitioner)
    assert any(
        "quantises rows only inside integer layers" in why for why in partitioner.refused.values()
    )


def test_layers_of_integers_round_by_themselves() -> None:
    def net(x: Tensor, w: Any) -> Tensor:
        return F.linear(by_row(x).view(1, 3, 16), w()) + F.linear(by_row(x), w())

    partitioner = XnnpackPartitioner()
    lower(Function(net, IntegerWeight(5, 16)), (torch.randn(3, 16),), partitioner)
    assert not partitioner.refused


def test_products_of_transposed_weights_in_groups_get_rounded_rows() -> None:
    torch.manual_seed(0)
    weight, x = IntegerWeight(5, 64, group=32, bits=4), torch.randn(3, 64)
    model, partitioner = (
        Function(lambda x, w: torch.mm(by_row(x), w().t()), weight),
        XnnpackPartitioner(),
    )
    lowered = lower(model, (x,), partitioner)
    assert "its weight has groups of 32 and is transposed" in partitioner.in_float.values()
    torch.testing.assert_close(load(emit(lowered).to_bytes()).run("forward", x), model(x))


def shared_rows(count: int) -> Callable[..., Any]:
    """Return a model in which one quantised tensor is dequantised for each of several layers."""

    def net(x: Tensor, *weights: Any) -> list[Tensor]:
        scale, zero = qd.choose_qparams_per_token_asymmetric(x, torch.int8)
        found = qd.quantize_per_token(x, scale, zero, -128, 127, torch.int8)

        def rows() -> Tensor:
            real: Tensor = qd.dequantize_per_token(
                found, scale, zero, -128, 127, torch.int8, torch.float32
            )
            return real

        return [F.linear(rows(), weights[0]()) for _ in range(count)]

    return net


def test_looking_for_readers_takes_steps_in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [0]
    whole = rounding._keeps_rows

    def counted(*args: Any) -> bool:
        steps[0] += 1
        return whole(*args)

    monkeypatch.setattr(rounding, "_keeps_rows", counted)
    found = []
    for count in (20, 40, 80):
        steps[0] = 0
        model = Function(shared_rows(count), IntegerWeight(4, 16))
        partitioner = XnnpackPartitioner()
        partitioner.partition(torch.export.export(model, (torch.randn(2, 16),)))
        assert not partitioner.refused
        found.append(steps[0])
    assert found[2] <= 2.3 * found[1] <= 2.3**2 * found[0]
