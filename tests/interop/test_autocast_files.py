"""Marked calls in regions of autocast run in the official runtime as in eager."""

from __future__ import annotations

import pytest
import torch

from lowerdeck.emitter import emit
from lowerdeck.lowered_module import get_lowered_backend_modules, to_backend
from lowerdeck.xnnpack import XnnpackPartitioner
from lowerdeck_zoo import official
from lowerdeck_zoo.models.modes import Layers


@pytest.mark.parametrize("on", [False, True])
@pytest.mark.parametrize("delegated", [False, True])
def test_marked_calls_in_regions(on: bool, delegated: bool) -> None:
    torch.manual_seed(0)
    model, inputs = Layers(on=on).eval(), (torch.randn(3, 8),)
    names = tuple(name for name, _ in model.named_modules() if name)
    program = torch.export.export(model, inputs, preserve_module_call_signature=names)
    if delegated:
        program = to_backend(program, XnnpackPartitioner())
        assert len(get_lowered_backend_modules(program.graph_module)) == 1
    outputs = official.outputs(emit(program).to_bytes(), [inputs])
    bound = 3e-2 if on else 1e-5
    torch.testing.assert_close(outputs[0][0], model(*inputs), rtol=bound, atol=bound)
