"""Speech encoders that the zoo lacks, through XNNPACK: loaded and run twenty times from a path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lowerdeck.lowered_module import lower
from lowerdeck_zoo import Of, official

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not official.available(), reason=official.REASON),
]

_LAYERS = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
_WAVES = {
    **_LAYERS,
    "conv_dim": (16, 16),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_prob": 0.0,
}
_CONFORMER = {**_WAVES, "conv_depthwise_kernel_size": 3}
_MELS = {**_LAYERS, "num_mel_bins": 16, "subsampling_conv_channels": 8}
_SEAMLESS = {
    "hidden_size": 32,
    "speech_encoder_layers": 2,
    "speech_encoder_attention_heads": 4,
    "speech_encoder_intermediate_size": 64,
    "feature_projection_input_dim": 16,
}
WAVE, FRAMES = (1, 400), (1, 24, 16)
# The module of transformers, model, config, settings and size of the input.
ENCODERS: dict[str, tuple[str, str, str, dict[str, Any], tuple[int, ...]]] = {
    "relative": (
        "wav2vec2_conformer",
        *("Wav2Vec2ConformerModel", "Wav2Vec2ConformerConfig"),
        {**_CONFORMER, "position_embeddings_type": "relative"},
        WAVE,
    ),
    "rotary": (
        "wav2vec2_conformer",
        *("Wav2Vec2ConformerModel", "Wav2Vec2ConformerConfig"),
        {**_CONFORMER, "position_embeddings_type": "rotary"},
        WAVE,
    ),
    "bert": (
        "wav2vec2_bert",
        *("Wav2Vec2BertModel", "Wav2Vec2BertConfig"),
        {**_LAYERS, "feature_projection_input_dim": 16, "conv_depthwise_kernel_size": 3},
        FRAMES,
    ),
    "parakeet": (
        "parakeet",
        *("ParakeetEncoder", "ParakeetEncoderConfig"),
        {**_MELS, "conv_kernel_size": 3},
        (1, 40, 16),
    ),
    "seamless": (
        "seamless_m4t",
        *("SeamlessM4TSpeechEncoder", "SeamlessM4TConfig"),
        _SEAMLESS,
        FRAMES,
    ),
    "seamless-2": (
        "seamless_m4t_v2",
        *("SeamlessM4Tv2SpeechEncoder", "SeamlessM4Tv2Config"),
        {**_SEAMLESS, "speech_encoder_chunk_size": 8},
        FRAMES,
    ),
    "wavlm": ("wavlm", "WavLMModel", "WavLMConfig", _WAVES, WAVE),
    "spectrogram": (
        "audio_spectrogram_transformer",
        *("ASTModel", "ASTConfig"),
        {**_LAYERS, "num_mel_bins": 16, "max_length": 40, "patch_size": 8, "time_stride": 8},
        (1, 40, 16),
    ),
}


@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_loads_and_runs_twenty_times(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    folder, kind, config, settings, sizes = ENCODERS[name]
    modeling = pytest.importorskip(f"transformers.models.{folder}.modeling_{folder}")
    inner = getattr(modeling, kind)(getattr(transformers, config)(**settings))
    model = Of(lambda self, x: self.inner(x, return_dict=True)[0], inner=inner).eval()
    x = torch.randn(sizes)
    with torch.no_grad():
        expected = model(x)
    path = tmp_path / "encoder.pte"
    lower((model, (x,)), "XnnpackBackend").save(path)
    cases = [official.Case(path, [official.Call((x,))] * 2)] * 20
    for outcome in official.run_many(cases):
        assert isinstance(outcome, official.Ran), outcome
        for (found,) in outcome.outputs:
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)
