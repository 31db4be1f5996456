"""Models that transformers' own exporter exports, without its patches for ExecuTorch.

They assert on booleans that they compute (``torch_compilable_check``).
"""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_leaves

from lowerdeck.lowered_module import lower
from lowerdeck.xnnpack import XnnpackPartitioner
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


HGNET = {
    "model_type": "hgnet_v2",
    "hidden_sizes": [16, 16, 32, 32],
    "stage_in_channels": [16, 16, 16, 32],
    "stage_mid_channels": [8, 8, 8, 8],
    "stage_out_channels": [16, 16, 32, 32],
    "stem_channels": [3, 8, 16],
    "embedding_size": 16,
    "depths": [1, 1, 1, 1],
    "stage_num_blocks": [1, 1, 1, 1],
    "stage_numb_of_layers": [1, 1, 1, 1],
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}
DOC_LAYOUT = {
    "backbone_config": HGNET,
    "image_size": [64, 64],
    "encoder_hidden_dim": 32,
    "encoder_in_channels": [16, 32, 32],
    "encoder_ffn_dim": 32,
    "encoder_attention_heads": 2,
    "encoder_layers": 1,
    "decoder_in_channels": [32, 32, 32],
    "decoder_ffn_dim": 32,
    "decoder_attention_heads": 2,
    "decoder_layers": 2,
    "d_model": 32,
    "num_queries": 10,
    "num_denoising": 0,
    "x4_feat_dim": 16,
    "mask_feature_channels": [16, 16],
}


def test_pp_doc_layout_with_dynamic_images_equals_eager() -> None:
    """Queries with nearly equal scores may change places: they are compared in order of size."""
    pytest.importorskip("transformers.exporters")
    from tests.clients import classes, run

    client = classes.Client("PPDocLayoutV3ForObjectDetection", "image", DOC_LAYOUT)
    model, program = run.exported_program(client, "dynamic")
    calls = list(run.calls_of(client, model, program, "dynamic"))
    lowered = lower(program, [XnnpackPartitioner()], bounds=run.bounds_of(program))
    results = official.outputs(
        bytes(lowered.buffer), [official.Call(tuple(inputs)) for inputs, _ in calls]
    )
    for result, (_, expected) in zip(results, calls, strict=True):
        leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        assert [leaf.shape for leaf in leaves] == [tensor.shape for tensor in expected]
        # The encoder's maps, then the scores and boxes of all positions.
        for position in (8, 9, 10, *range(14, len(leaves))):
            torch.testing.assert_close(leaves[position], expected[position], atol=1e-4, rtol=1e-3)
        scores, reference = (values[12].flatten(1).sort(1).values for values in (leaves, expected))
        torch.testing.assert_close(scores, reference, atol=1e-4, rtol=1e-3)
