"""Views of memory that the caller brings: what the runtime runs right, the verifier accepts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import export

from lowerdeck.emitter import EmitConfig, emit
from lowerdeck.serializer import serialize_pte, verify_pte
from lowerdeck_zoo import Of, official

pytestmark = pytest.mark.skipif(not official.available(), reason=official.REASON)


def _view_before(x: torch.Tensor) -> torch.Tensor:
    y = x.view(-1)
    x.add_(1.0)
    return y * 2


def _views_of_views(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x.view(-1)
    return (y * 2).view(4, 4), y.view(2, 8).view(8, 2) + 1


def _view_returned(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x.mul_(3.0)
    return x.view(-1), x.view(2, 8) - 1


def _slice_written(x: torch.Tensor) -> torch.Tensor:
    x[0].mul_(3.0)
    return x.view(2, 8) + 1


FUNCTIONS = [_view_before, _views_of_views, _view_returned, _slice_written]


@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_views_of_inputs_are_accepted_and_run_right(
    function: Callable[[torch.Tensor], Any], planned: bool, tmp_path: Path
) -> None:
    model = Of(function)
    exported = export(model, (torch.zeros(4, 4),))
    data = serialize_pte(emit(exported, config=EmitConfig(plan_inputs=planned)).program)
    verify_pte(data)
    path = tmp_path / "model.pte"
    path.write_bytes(data)
    inputs = [torch.arange(16.0).reshape(4, 4) + 100 * number for number in range(3)]
    for source in (path, data):
        calls = [official.Call((each.clone(),)) for each in inputs]
        outcome = official.run(source, calls)
        assert isinstance(outcome, official.Ran), outcome
        for got, each in zip(outcome.outputs, inputs, strict=True):
            expected = model(each.clone())
            wanted = expected if isinstance(expected, tuple) else (expected,)
            # Inputs that the method writes come first or last, as the signature numbers them.
            for tensor in wanted:
                assert any(
                    tensor.shape == found.shape and torch.equal(tensor, found) for found in got
                )
