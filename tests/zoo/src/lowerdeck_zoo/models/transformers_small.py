"""Models of Hugging Face transformers from small configurations, with random weights."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lowerdeck_zoo.models.libraries import import_torchvision, is_installed
from lowerdeck_zoo.models.small_configs import SMALL_SIZES, small_config
from lowerdeck_zoo.program import Program, normal

Calls = Callable[[], list[tuple[torch.Tensor, ...]]]

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 99,
    "max_position_embeddings": 64,
}
GROUPED = {**SMALL, "num_key_value_heads": 2, "pad_token_id": 0}
WIDE = {**GROUPED, "head_dim": 8}
_WAVES = {
    "conv_dim": (16, 16, 16),
    "conv_stride": (5, 2, 2),
    "conv_kernel": (10, 3, 3),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "num_feat_extract_layers": 3,
    "vocab_size": 32,
}


class First(nn.Module):
    """The first output of a model whose inputs are given by name, without a cache."""

    def __init__(self, model: nn.Module, names: tuple[str, ...], options: dict[str, Any]) -> None:
        super().__init__()
        self.model, self.names, self.options = model, names, options

    def forward(self, *tensors: torch.Tensor) -> Any:
        given = dict(zip(self.names, tensors, strict=True))
        return self.model(**given, **self.options, return_dict=False)[0]


@dataclass(frozen=True, slots=True)
class Configured:
    """A model: its class, its configuration, and how it is called.

    Attributes:
        model: Name of the model's class.
        config: Name of its configuration's class.
        settings: Arguments of the configuration beside those of ``SMALL_SIZES``.
        names: Names of the inputs.
        calls: Makes the inputs of each call.
        options: Further arguments of each call.
        heavy: Whether it is left to the nightly run.
    """

    model: str
    config: str
    settings: dict[str, Any]
    names: tuple[str, ...]
    calls: Calls
    options: dict[str, Any]
    heavy: bool = True

    def build(self, transformers: Any) -> nn.Module:
        """Return the module with random weights."""
        kind = getattr(transformers, self.config)
        config = small_config(kind, {**SMALL_SIZES, **self.settings})
        return First(getattr(transformers, self.model)(config), self.names, self.options).eval()


def _tokens(rows: int = 1, length: int = 11) -> Calls:
    return lambda: [(torch.randint(3, 99, (rows, length)),) for _ in range(3)]


def _masked() -> list[tuple[torch.Tensor, ...]]:
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, 5:] = 0
    return [(torch.randint(3, 99, (2, 9)), one) for one in (mask, mask.flip(0), mask)]


def _pairs() -> list[tuple[torch.Tensor, ...]]:
    return [(torch.randint(3, 99, (1, 9)), torch.randint(3, 99, (1, 5))) for _ in range(3)]


def _decoder(name: str, *, heavy: bool = True, **settings: Any) -> Configured:
    model, options = f"{name}ForCausalLM", {"use_cache": False}
    config = f"{name}TextConfig" if name == "Gemma3" else f"{name}Config"
    return Configured(model, config, settings, ("input_ids",), _tokens(), options, heavy)


def _encoder(name: str, *, heavy: bool = True, **settings: Any) -> Configured:
    names = ("input_ids", "attention_mask")
    return Configured(f"{name}Model", f"{name}Config", settings, names, _masked, {}, heavy)


def _translator(name: str, model: str, *, heavy: bool = True) -> Configured:
    names, options = ("input_ids", "decoder_input_ids"), {"use_cache": False}
    return Configured(model, f"{name}Config", {}, names, _pairs, options, heavy)


def _seeing(
    model: str,
    config: str,
    *sizes: int,
    name: str = "pixel_values",
    heavy: bool = True,
    **settings: Any,
) -> Configured:
    shape = sizes or (1, 3, 32, 32)
    return Configured(model, f"{config}Config", settings, (name,), normal(*shape), {}, heavy)


def _hearing(
    model: str, config: str, *sizes: int, name: str = "input_values", **settings: Any
) -> Configured:
    return _seeing(model, config, *(sizes or (1, 800)), name=name, **settings)


CONFIGURED = (
    # Decoders
    *(_decoder(name, heavy=False) for name in ("Llama", "Qwen3", "Mistral", "Gemma")),
    _decoder("Gemma2"),
    *(_decoder(name, heavy=False) for name in ("Gemma3", "Phi3")),
    *(_decoder(name) for name in ("Phi", "Qwen2", "Qwen2Moe")),
    _decoder("Mixtral", heavy=False),
    _decoder("GptOss"),
    _decoder("DeepseekV3", num_key_value_heads=4, n_group=2),
    _decoder("Falcon", alibi=True, new_decoder_architecture=False),
    *(_decoder(name) for name in ("Bloom", "GPTNeoX")),
    _decoder("Mamba", heavy=False),
    _decoder("Mamba2", num_heads=8, n_groups=2, chunk_size=8),
    _decoder("Rwkv", attention_hidden_size=64),
    _decoder("RecurrentGemma", lru_width=64, block_types=["recurrent", "attention"]),
    _decoder("Lfm2", layer_types=["conv", "full_attention"]),
    *(_decoder(name) for name in ("Granite", "Olmo2", "StableLm", "Cohere", "SmolLM3")),
    # Encoders
    *(_encoder(name, heavy=False) for name in ("Bert", "DistilBert")),
    *(_encoder(name) for name in ("Roberta", "Albert", "Electra")),
    _encoder(
        "DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8
    ),
    *(_encoder(name) for name in ("MPNet", "XLNet", "LayoutLM")),
    Configured("FNetModel", "FNetConfig", {}, ("input_ids",), _tokens(), {}),
    # From one sequence to another
    _translator("T5", "T5ForConditionalGeneration", heavy=False),
    _translator("Bart", "BartForConditionalGeneration"),
    Configured(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {"max_source_positions": 30, "max_target_positions": 20, "decoder_start_token_id": 1},
        ("input_features", "decoder_input_ids"),
        lambda: [(torch.randn(1, 16, 60), torch.randint(0, 99, (1, 5))) for _ in range(3)],
        {"use_cache": False},
        heavy=False,
    ),
    # Sound
    _hearing("Wav2Vec2ForCTC", "Wav2Vec2", **_WAVES),
    *(_hearing(f"{name}Model", name, **_WAVES) for name in ("Hubert", "WavLM")),
    *(
        _hearing(
            f"Wav2Vec2Conformer{kind}",
            "Wav2Vec2Conformer",
            **_WAVES,
            conv_depthwise_kernel_size=3,
            position_embeddings_type=positions,
        )
        for kind, positions in (("Model", "relative"), ("ForCTC", "rotary"))
    ),
    _hearing(
        *("Wav2Vec2BertModel", "Wav2Vec2Bert", 1, 24, 16),
        name="input_features",
        feature_projection_input_dim=16,
        conv_depthwise_kernel_size=3,
    ),
    _hearing(
        *("ParakeetEncoder", "ParakeetEncoder", 1, 40, 16),
        name="input_features",
        subsampling_conv_channels=8,
        conv_kernel_size=3,
    ),
    _hearing("ASTModel", "AST", 1, 40, 16, max_length=40, time_stride=8),
    # Pictures
    _seeing("ViTModel", "ViT", heavy=False),
    _seeing("Data2VecVisionModel", "Data2VecVision", use_relative_position_bias=True, heavy=False),
    _seeing(
        *("Data2VecVisionForImageClassification", "Data2VecVision"),
        use_shared_relative_position_bias=True,
    ),
    _seeing("BeitModel", "Beit", use_relative_position_bias=True),
    _seeing("Dinov2Model", "Dinov2"),
    _seeing("CLIPVisionModel", "CLIPVision", heavy=False),
    _seeing("SiglipVisionModel", "SiglipVision"),
    _seeing(
        *("SegformerForSemanticSegmentation", "Segformer", 1, 3, 64, 64),
        hidden_sizes=[8, 16, 16, 32],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 2, 4],
        decoder_hidden_size=16,
        num_labels=5,
    ),
    _seeing(
        *("SwinModel", "Swin"),
        patch_size=2,
        embed_dim=8,
        depths=[1, 1],
        num_heads=[2, 2],
        window_size=4,
    ),
    _seeing(
        *("ConvNextModel", "ConvNext"),
        hidden_sizes=[8, 16],
        depths=[1, 1],
        num_stages=2,
        # The initial scale of a layer, 1e-6, would hide what the modules in it return.
        layer_scale_init_value=1.0,
    ),
    *(_seeing(f"{name}Model", name, 1, 4, 3, 32, 32) for name in ("VideoMAE", "Timesformer")),
    # Last: others know these by their numbers.
    Configured(
        *("GPT2LMHeadModel", "GPT2Config", {}, ("input_ids",), _tokens(), {"use_cache": False}),
        heavy=False,
    ),
)


def _program(item: Configured) -> Program:
    def build() -> nn.Module:
        import_torchvision()
        return item.build(importlib.import_module("transformers"))

    domain = "language-model" if "input_ids" in item.names else "vision"
    tags = f"large transformers {domain}"
    return Program(f"transformers_{item.model}", build, item.calls, tags=tags)


PROGRAMS = tuple(map(_program, CONFIGURED)) if is_installed("transformers") else ()
