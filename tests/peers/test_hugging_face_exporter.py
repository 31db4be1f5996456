"""Models that transformers' own exporter exports, without its patches for ExecuTorch.

They assert on booleans that they compute (``torch_compilable_check``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from lowerdeck.decompose import explain
from lowerdeck.lowered_module import lower
from lowerdeck_zoo import official

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not official.available(), reason=official.REASON),
]

_LAYERS = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_IMAGE_TOKEN = 99
_PATCHES = {**_LAYERS, "num_patches": 16, "patch_size": 4}


def _words() -> dict[str, torch.Tensor]:
    words = torch.randint(0, 90, (1, 12))
    words[0, 2:6] = _IMAGE_TOKEN
    return {"input_ids": words, "attention_mask": torch.ones_like(words)}


def _patches(*sizes: tuple[int, int]) -> dict[str, torch.Tensor]:
    most = max(height * width for height, width in sizes)
    return {
        "pixel_values": torch.randn(len(sizes), most, 48),
        "pixel_attention_mask": torch.ones(len(sizes), most, dtype=torch.long),
        "spatial_shapes": torch.tensor(sizes),
    }


def _llava() -> tuple[Any, dict[str, torch.Tensor]]:
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(
            **_LAYERS, image_size=16, patch_size=8, projection_dim=32
        ),
        text_config=transformers.LlamaConfig(**_LAYERS, num_key_value_heads=2, vocab_size=100),
        image_token_id=_IMAGE_TOKEN,
        image_seq_length=4,
    )
    inputs = {**_words(), "pixel_values": torch.randn(1, 3, 16, 16)}
    return transformers.LlavaForConditionalGeneration(config), inputs


def _siglip2() -> tuple[Any, dict[str, torch.Tensor]]:
    model = transformers.Siglip2VisionModel(transformers.Siglip2VisionConfig(**_PATCHES))
    return model, _patches((3, 4), (4, 3))


def _lfm2() -> tuple[Any, dict[str, torch.Tensor]]:
    config = transformers.Lfm2VlConfig(
        vision_config=transformers.Siglip2VisionConfig(**_PATCHES),
        text_config=transformers.Lfm2Config(
            **_LAYERS,
            num_key_value_heads=2,
            vocab_size=100,
            layer_types=["full_attention", "conv"],
        ),
        image_token_id=_IMAGE_TOKEN,
        downsample_factor=2,
        projector_hidden_size=32,
    )
    return transformers.Lfm2VlForConditionalGeneration(config), {**_words(), **_patches((4, 4))}


def _grounding_dino() -> tuple[Any, dict[str, torch.Tensor]]:
    swin = transformers.SwinConfig(
        image_size=32,
        embed_dim=16,
        depths=[1, 1, 1, 1],
        num_heads=[2, 2, 2, 2],
        window_size=2,
        patch_size=2,
        out_indices=[2, 3, 4],
    )
    config = transformers.GroundingDinoConfig(
        backbone_config=swin,
        text_config=transformers.BertConfig(
            **_LAYERS, vocab_size=1200, max_position_embeddings=64
        ),
        d_model=32,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        num_queries=10,
        num_feature_levels=3,
        max_text_len=16,
    )
    words = torch.tensor([[101, 1037, 500, 1012, 900, 1012, 102, 30]])
    inputs = {
        "pixel_values": torch.randn(1, 3, 32, 32),
        "pixel_mask": torch.ones(1, 32, 32, dtype=torch.long),
        "input_ids": words,
        "attention_mask": torch.ones_like(words),
        "token_type_ids": torch.zeros_like(words),
    }
    return transformers.GroundingDinoForObjectDetection(config), inputs


@pytest.mark.parametrize("backend", [None, "XnnpackBackend"])
@pytest.mark.parametrize("build", [_llava, _siglip2, _lfm2, _grounding_dino])
def test_a_model_that_checks_its_inputs_equals_eager(
    build: Callable[[], tuple[Any, dict[str, torch.Tensor]]], backend: str | None
) -> None:
    exporting = pytest.importorskip("transformers.exporters")
    torch.manual_seed(0)
    model, inputs = build()
    model.eval()
    with torch.no_grad():
        wanted = model(**inputs)
        exporter = exporting.DynamoExporter()
        program, _ = exporter.export_program(model, inputs, exporting.DynamoConfig(dynamic=False))
    assert explain(program).reason is None
    data = lower(program, backend).to_bytes()
    call = official.Call(tuple(pytree.tree_leaves(program.example_inputs)))
    outcome = official.run(data, [call])
    assert isinstance(outcome, official.Ran), outcome
    expected = [leaf for leaf in pytree.tree_leaves(wanted) if isinstance(leaf, torch.Tensor)]
    found = [leaf for leaf in outcome.outputs[0] if isinstance(leaf, torch.Tensor)]
    torch.testing.assert_close(found[: len(expected)], expected, atol=1e-4, rtol=1e-3)
