"""Models of Hugging Face transformers from small configurations, with random weights."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lowerdeck_zoo.models.libraries import import_torchvision, is_installed
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
IMAGE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}
_BLOCKS = {
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
}
_FRAMES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
_WAVES = {
    **_FRAMES,
    "conv_dim": (16, 16, 16),
    "conv_stride": (5, 2, 2),
    "conv_kernel": (10, 3, 3),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "num_feat_extract_layers": 3,
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
        settings: Arguments of the configuration.
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
        config = getattr(transformers, self.config)(**self.settings)
        return First(getattr(transformers, self.model)(config), self.names, self.options).eval()


def _tokens(rows: int = 1, length: int = 11) -> Calls:
    return lambda: [(torch.randint(3, 99, (rows, length)),) for _ in range(3)]


def _masked() -> list[tuple[torch.Tensor, ...]]:
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, 5:] = 0
    return [(torch.randint(3, 99, (2, 9)), one) for one in (mask, mask.flip(0), mask)]


def _pairs() -> list[tuple[torch.Tensor, ...]]:
    return [(torch.randint(3, 99, (1, 9)), torch.randint(3, 99, (1, 5))) for _ in range(3)]


def _decoder(name: str, settings: dict[str, Any], *, heavy: bool = True) -> Configured:
    config = f"{name}TextConfig" if name == "Gemma3" else f"{name}Config"
    return Configured(
        f"{name}ForCausalLM",
        config,
        settings,
        ("input_ids",),
        _tokens(),
        {"use_cache": False},
        heavy,
    )


def _encoder(name: str, settings: dict[str, Any], *, heavy: bool = True) -> Configured:
    names = ("input_ids", "attention_mask")
    return Configured(f"{name}Model", f"{name}Config", settings, names, _masked, {}, heavy)


def _translator(name: str, model: str, settings: dict[str, Any], *, heavy: bool = True):
    names, options = ("input_ids", "decoder_input_ids"), {"use_cache": False}
    return Configured(model, f"{name}Config", settings, names, _pairs, options, heavy)


def _seeing(
    model: str,
    config: str,
    settings: dict[str, Any],
    *sizes: int,
    name: str = "pixel_values",
    heavy: bool = True,
) -> Configured:
    shape = sizes or (1, 3, 32, 32)
    return Configured(model, config, settings, (name,), normal(*shape), {}, heavy)


_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_SWIN = {"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}

CONFIGURED = (
    # Decoders
    _decoder("Llama", GROUPED, heavy=False),
    _decoder("Qwen3", WIDE, heavy=False),
    _decoder("Mistral", GROUPED, heavy=False),
    _decoder("Gemma", WIDE, heavy=False),
    _decoder("Gemma2", {**WIDE, "sliding_window": 4}),
    _decoder("Gemma3", {**WIDE, "sliding_window": 4}, heavy=False),
    _decoder("Phi3", GROUPED, heavy=False),
    _decoder("Phi", SMALL),
    _decoder("Qwen2", GROUPED),
    _decoder(
        "Qwen2Moe",
        {**GROUPED, **_MOE, "num_experts": 4, "shared_expert_intermediate_size": 32},
    ),
    _decoder("Mixtral", {**GROUPED, "num_local_experts": 4}, heavy=False),
    _decoder(
        "GptOss",
        {**WIDE, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
    ),
    _decoder(
        "DeepseekV3",
        {
            **GROUPED,
            "num_key_value_heads": 4,
            **_MOE,
            "kv_lora_rank": 8,
            "q_lora_rank": 8,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    _decoder(
        "Falcon",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "vocab_size": 99,
            "alibi": True,
            "new_decoder_architecture": False,
        },
    ),
    _decoder("Bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99}),
    _decoder("GPTNeoX", SMALL),
    _decoder(
        "Mamba",
        {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 99, "state_size": 8},
        heavy=False,
    ),
    _decoder(
        "Mamba2",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "vocab_size": 99,
            "state_size": 8,
            "head_dim": 16,
            "num_heads": 4,
            "n_groups": 2,
            "chunk_size": 8,
        },
    ),
    _decoder(
        "Rwkv",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "vocab_size": 99,
            "attention_hidden_size": 32,
            "intermediate_size": 64,
        },
    ),
    _decoder(
        "RecurrentGemma",
        {
            **GROUPED,
            "lru_width": 32,
            "attention_window_size": 8,
            "block_types": ["recurrent", "attention"],
        },
    ),
    _decoder("Lfm2", {**GROUPED, "layer_types": ["conv", "full_attention"]}),
    _decoder("Granite", GROUPED),
    _decoder("Olmo2", GROUPED),
    _decoder("StableLm", GROUPED),
    _decoder("Cohere", {**GROUPED, "eos_token_id": 1, "bos_token_id": 2}),
    _decoder("SmolLM3", GROUPED),
    # Encoders
    _encoder("Bert", SMALL, heavy=False),
    _encoder(
        "DistilBert",
        {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "vocab_size": 99},
        heavy=False,
    ),
    _encoder("Roberta", SMALL),
    _encoder("Albert", {**SMALL, "embedding_size": 16}),
    _encoder("Electra", {**SMALL, "embedding_size": 16}),
    _encoder(
        "DebertaV2",
        {
            **SMALL,
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_buckets": 8,
        },
    ),
    _encoder("MPNet", SMALL),
    _encoder("XLNet", {"vocab_size": 99, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}),
    _encoder("LayoutLM", SMALL),
    Configured(
        "FNetModel",
        "FNetConfig",
        {name: value for name, value in SMALL.items() if name != "num_attention_heads"},
        ("input_ids",),
        _tokens(),
        {},
    ),
    # From one sequence to another
    _translator(
        "T5",
        "T5ForConditionalGeneration",
        {
            "vocab_size": 99,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 4,
        },
        heavy=False,
    ),
    _translator(
        "Bart",
        "BartForConditionalGeneration",
        {"vocab_size": 99, "d_model": 32, "max_position_embeddings": 64, **_BLOCKS},
    ),
    Configured(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            "vocab_size": 99,
            "d_model": 32,
            "max_source_positions": 30,
            "max_target_positions": 20,
            "num_mel_bins": 16,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
            **_BLOCKS,
        },
        ("input_features", "decoder_input_ids"),
        lambda: [(torch.randn(1, 16, 60), torch.randint(0, 99, (1, 5))) for _ in range(3)],
        {"use_cache": False},
        heavy=False,
    ),
    # Sound
    _seeing(
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        {"vocab_size": 32, **_WAVES},
        *(1, 800),
        name="input_values",
    ),
    _seeing("HubertModel", "HubertConfig", _WAVES, *(1, 800), name="input_values"),
    _seeing("WavLMModel", "WavLMConfig", _WAVES, *(1, 800), name="input_values"),
    *(
        _seeing(
            f"Wav2Vec2Conformer{kind}",
            "Wav2Vec2ConformerConfig",
            {"vocab_size": 32, **_WAVES, "conv_depthwise_kernel_size": 3}
            | {"position_embeddings_type": positions},
            *(1, 800),
            name="input_values",
        )
        for kind, positions in (("Model", "relative"), ("ForCTC", "rotary"))
    ),
    _seeing(
        "Wav2Vec2BertModel",
        "Wav2Vec2BertConfig",
        {**_FRAMES, "feature_projection_input_dim": 16, "conv_depthwise_kernel_size": 3},
        *(1, 24, 16),
        name="input_features",
    ),
    _seeing(
        "ParakeetEncoder",
        "ParakeetEncoderConfig",
        {**_FRAMES, "num_mel_bins": 16, "subsampling_conv_channels": 8, "conv_kernel_size": 3},
        *(1, 40, 16),
        name="input_features",
    ),
    _seeing(
        "ASTModel",
        "ASTConfig",
        {**_FRAMES, "num_mel_bins": 16, "max_length": 40, "patch_size": 8, "time_stride": 8},
        *(1, 40, 16),
        name="input_values",
    ),
    # Pictures
    _seeing("ViTModel", "ViTConfig", IMAGE, heavy=False),
    _seeing(
        "Data2VecVisionModel",
        "Data2VecVisionConfig",
        {**IMAGE, "use_relative_position_bias": True},
        heavy=False,
    ),
    _seeing(
        "Data2VecVisionForImageClassification",
        "Data2VecVisionConfig",
        {**IMAGE, "use_shared_relative_position_bias": True},
    ),
    _seeing("BeitModel", "BeitConfig", {**IMAGE, "use_relative_position_bias": True}),
    _seeing(
        "Dinov2Model",
        "Dinov2Config",
        {name: value for name, value in IMAGE.items() if name != "intermediate_size"},
    ),
    _seeing("CLIPVisionModel", "CLIPVisionConfig", IMAGE, heavy=False),
    _seeing("SiglipVisionModel", "SiglipVisionConfig", IMAGE),
    _seeing(
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        {
            "hidden_sizes": [8, 16, 16, 32],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 2, 2, 4],
            "decoder_hidden_size": 16,
            "num_labels": 5,
        },
        *(1, 3, 64, 64),
    ),
    _seeing("SwinModel", "SwinConfig", {"image_size": 32, "patch_size": 2, **_SWIN}),
    _seeing(
        "ConvNextModel",
        "ConvNextConfig",
        # The initial scale of a layer, 1e-6, would hide what the modules in it return.
        {
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "num_stages": 2,
            "layer_scale_init_value": 1.0,
        },
    ),
    _seeing("VideoMAEModel", "VideoMAEConfig", {**IMAGE, "num_frames": 4}, *(1, 4, 3, 32, 32)),
    _seeing(
        "TimesformerModel", "TimesformerConfig", {**IMAGE, "num_frames": 4}, *(1, 4, 3, 32, 32)
    ),
    # Last: others know these by their numbers.
    Configured(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99, "n_positions": 64}
        | {"bos_token_id": 1, "eos_token_id": 2},
        ("input_ids",),
        _tokens(),
        {"use_cache": False},
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
