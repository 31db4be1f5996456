"""Arithmetic on sizes and rules for varying sizes give eager's values at every size."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.export import Dim

from lowerdeck.emitter import emit
from lowerdeck.runner import load
from lowerdeck_zoo import Of, assert_close, official

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not official.available(), reason=official.REASON),
]

SIZES = ((4, 5), (3, 3), (9, 9), (2, 2), (2, 7))


def _powers(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    n, m = x.shape
    return x * n**2, torch.ones(n**3), x * n**0.5, x * m**-1.5, x * 2**n, x * 0.5**m


def _rounding(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    n, m = x.shape
    return x * math.floor(n / 2.5), x * round(n / 3), x * abs(n - m), x * (n << 2) + (m >> 1)


def _truths(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    n, m = x.shape
    return (
        x * torch.sym_ite(n != 3, 2, 5),
        x * torch.sym_ite((n > 3) & (m > 2), 2, 5),
        x * torch.sym_ite((n > 3) | (m > 2), 2, 5),
    )


def _padding(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(x, (0, 9 - x.shape[1], -1, 2))


def _tables(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    chosen = (x > 0).long()
    return (
        torch.zeros(3, x.shape[1]).scatter_reduce(0, chosen, x, "amax"),
        torch.sort(chosen, dim=0, stable=True)[1],
        torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0])),
    )


def _volume(x: torch.Tensor) -> torch.Tensor:
    volume = x.reshape(1, 1, x.shape[0], x.shape[1], 1).expand(-1, 2, -1, -1, 4)
    weight = torch.arange(48.0).reshape(3, 2, 2, 2, 2) / 48
    y = torch.nn.functional.conv3d(volume, weight, padding=1)
    return torch.nn.functional.max_pool3d(y, 2, 1) + torch.nn.functional.avg_pool3d(y, 2, 1)


@pytest.mark.parametrize("function", [_powers, _rounding, _truths, _padding, _tables, _volume])
def test_every_size_gives_eagers_values(function: Callable[..., Any]) -> None:
    shapes = {0: Dim("n", min=2, max=9), 1: Dim("m", min=2, max=9)}
    exported = torch.export.export(Of(function), (torch.randn(4, 5),), dynamic_shapes=((shapes,),))
    data = emit(exported).to_bytes()
    inputs = [torch.randn(*size) for size in SIZES]
    outcome = official.run(data, [official.Call((x,)) for x in inputs])
    assert isinstance(outcome, official.Ran), outcome
    program = load(data, memory="poison")
    for x, found in zip(inputs, outcome.outputs, strict=True):
        wanted = function(x)
        wanted = wanted if isinstance(wanted, tuple) else (wanted,)
        assert_close(found, wanted, atol=1e-4)
        assert_close(torch.utils._pytree.tree_leaves(program.run("forward", x)), wanted, atol=1e-4)
