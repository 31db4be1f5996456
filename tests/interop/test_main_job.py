"""The main job: ResNet-18 from torch.export to a file that the official runtime runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from examples.resnet18 import example
from lowerdeck.emitter import emit
from lowerdeck.runner import load
from lowerdeck_zoo import official

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.skipif(not official.available(), reason=official.REASON)
def test_resnet18_with_nothing_delegated_equals_eager_in_the_official_runtime(
    tmp_path: Path,
) -> None:
    module, inputs = example()
    emitted = emit(torch.export.export(module, inputs))
    path = tmp_path / "resnet18.pte"
    emitted.save(path)
    with torch.no_grad():
        expected = module(*inputs)
    outcome = official.run(path, [official.Call(inputs)])
    assert isinstance(outcome, official.Ran), outcome
    torch.testing.assert_close(outcome.outputs[0][0], expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(load(path).run("forward", *inputs), expected, atol=1e-4, rtol=1e-4)
