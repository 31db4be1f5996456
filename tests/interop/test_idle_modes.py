"""Programs with regions of modes, lowered raw, run in the official runtime as in eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.xnnpack_models import import_torchvision
from lowerdeck.emitter import emit
from lowerdeck.lowered_module import get_lowered_backend_modules, to_backend
from lowerdeck.unflatten import export_preserving
from lowerdeck.xnnpack import XnnpackPartitioner
from lowerdeck_zoo import official
from lowerdeck_zoo.models.modes import Layers

pytestmark = pytest.mark.skipif(not official.available(), reason=official.REASON)


def _found(model: nn.Module, program: Any, inputs: tuple[Tensor, ...]) -> tuple[int, Tensor]:
    lowered = to_backend(program, XnnpackPartitioner())
    outcome = official.run(bytes(emit(lowered).to_bytes()), [official.Call(inputs)])
    assert isinstance(outcome, official.Ran), outcome
    return len(get_lowered_backend_modules(lowered.graph_module)), outcome.outputs[0][0]


@pytest.mark.parametrize("on", [False, True])
@pytest.mark.parametrize("marked", [False, True])
def test_regions_lowered_raw(on: bool, marked: bool) -> None:
    torch.manual_seed(0)
    model, inputs = Layers(on=on).eval(), (torch.randn(3, 8),)
    program = (export_preserving if marked else torch.export.export)(model, inputs)
    count, found = _found(model, program, inputs)
    assert count == (2 if on else 1)
    bound = 3e-2 if on else 1e-5
    torch.testing.assert_close(found, model(*inputs), rtol=bound, atol=bound)


@pytest.mark.parametrize("on", [False, True])
def test_marked_calls_in_regions_are_emitted(on: bool) -> None:
    torch.manual_seed(0)
    model, inputs = Layers(on=on).eval(), (torch.randn(3, 8),)
    made = bytes(emit(export_preserving(model, inputs)).to_bytes())
    outcome = official.run(made, [official.Call(inputs)])
    assert isinstance(outcome, official.Ran), outcome
    bound = 3e-2 if on else 1e-5
    torch.testing.assert_close(outcome.outputs[0][0], model(*inputs), rtol=bound, atol=bound)


def test_efficientvit_is_one_delegate() -> None:
    import_torchvision()
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model, inputs = timm.create_model("efficientvit_b0").eval(), (torch.randn(1, 3, 128, 128),)
    count, found = _found(model, torch.export.export(model, inputs), inputs)
    assert count == 1
    torch.testing.assert_close(found, model(*inputs), rtol=1e-4, atol=1e-4)
