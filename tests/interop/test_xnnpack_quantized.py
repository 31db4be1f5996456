"""Quantised and half-precision XNNPACK payloads of this project in the official runtime."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lowerdeck_zoo import official

sys.path.insert(0, str(Path(__file__).parents[2] / "packages/xnnpack/tests"))
from quantized_cases import QuantizedCase, expected, run_time_cases, static_cases

from lowerdeck.emitter import emit
from lowerdeck.lowered_module import to_backend
from lowerdeck.serializer import verify_pte
from lowerdeck.xnnpack import XnnpackPartitioner

pytestmark = pytest.mark.skipif(not official.available(), reason=official.REASON)


def in_official_runtime(
    model: torch.nn.Module, inputs: tuple[Any, ...], folder: Path, **options: Any
) -> list[torch.Tensor]:
    """Return what a model gives there, the same from a path and from bytes."""
    program = to_backend(torch.export.export(model, inputs), XnnpackPartitioner(**options))
    file = emit(program).to_bytes()
    verify_pte(file)
    path = folder / "model.pte"
    path.write_bytes(file)
    results = []
    for source in (path, file):
        outcome = official.run(source, [official.Call(inputs)])
        assert isinstance(outcome, official.Ran), outcome
        results.append(outcome.outputs[0])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    return results[0]


@pytest.mark.parametrize("one", list(static_cases()), ids=lambda one: one.name)
def test_integers_equal_eager_to_a_step(one: QuantizedCase, tmp_path: Path) -> None:
    for found, wanted in zip(
        in_official_runtime(one.model, one.inputs, tmp_path), expected(one), strict=True
    ):
        assert found.dtype == wanted.dtype
        assert float((found.float() - wanted.float()).abs().max()) <= one.step


@pytest.mark.parametrize("one", list(run_time_cases()), ids=lambda one: one.name)
def test_layers_that_quantise_at_run_time_equal_the_formula(
    one: QuantizedCase, tmp_path: Path
) -> None:
    (found,), (wanted,) = in_official_runtime(one.model, one.inputs, tmp_path), expected(one)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=one.step)
