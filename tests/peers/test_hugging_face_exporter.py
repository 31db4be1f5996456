"""Models that transformers' own exporter exports, without its patches for ExecuTorch.

They assert on booleans that they compute (``torch_compilable_check``).
"""

from __future__ import annotations

import pytest

from lowerdeck_zoo import official

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not official.available(), reason=official.REASON),
]


@pytest.mark.parametrize("delegate", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        *("LlavaForConditionalGeneration", "Siglip2VisionModel"),
        *("Lfm2VlForConditionalGeneration", "GroundingDinoForObjectDetection"),
    ],
)
def test_a_model_that_checks_its_inputs_equals_eager(name: str, delegate: bool) -> None:
    pytest.importorskip("transformers.exporters")
    from tests.clients import classes, run

    found: dict[str, object] = {}
    for step in run.steps(classes.CLIENTS[name], "static", delegate=delegate):
        found |= step
    assert found["outcome"] == "right", found
    assert bool(found["delegates"]) == delegate
