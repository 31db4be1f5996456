"""Tensors without elements, however they come about, come out of the official runtime."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path

import pytest
import torch

from lowerdeck.emitter import EmitConfig, emit
from lowerdeck_zoo import Of, assert_close, official

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not official.available(), reason=official.REASON),
]

LAST = torch.channels_last


def shapes() -> list[tuple[int, ...]]:
    return [dims for dims in itertools.product((0, 1, 2), repeat=3) if 0 in dims]


def everything(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    """Return what comes of two tensors of one shape, one of whose dimensions is 0."""
    images = a.unsqueeze(0)
    return [
        a @ b.mT,
        a.mT @ b,
        a.mT,
        a.mT + 1,
        a.relu(),
        a.permute(2, 0, 1) * 2,
        a.reshape(-1),
        torch.cat([a, b], 1),
        torch.stack([a, b]),
        a.sum(0),
        a[:, :0],
        a.expand(2, *a.shape) + 0,
        images.contiguous(memory_format=LAST) + 1,
        images.permute(0, 3, 1, 2) + 1,
        torch.zeros(2, 0, 3),
    ]


@pytest.mark.parametrize("plan_outputs", [True, False])
def test_every_shape_of_nothing(plan_outputs: bool, tmp_path: Path) -> None:
    cases, expected = [], []
    for number, dims in enumerate(shapes()):
        args = (torch.randn(dims), torch.randn(dims))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exported = torch.export.export(Of(everything), args)
        emitted = emit(exported, config=EmitConfig(plan_outputs=plan_outputs))
        emitted.save(tmp_path / f"{number}.pte")
        cases.append(official.Case(tmp_path / f"{number}.pte", [official.Call(args)]))
        cases.append(official.Case(emitted.to_bytes(), [official.Call(args)]))
        expected += [everything(*args)] * 2
    for outcome, wanted in zip(official.run_many(cases), expected, strict=True):
        assert isinstance(outcome, official.Ran), outcome
        assert_close(outcome.outputs[0], wanted)
