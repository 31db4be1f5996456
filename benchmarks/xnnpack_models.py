"""The float32 models that the XNNPACK backends are compared on, made from configurations alone.

torchvision, timm and transformers are imported when one of their models is asked for; where they
are missing, the comparison says so and goes on.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import lowerdeck_zoo as zoo
from lowerdeck_zoo.models.libraries import import_torchvision

Example = tuple[nn.Module, tuple[Any, ...]]


class Result(nn.Module):
    """Returns one of the results of a model that returns many by name."""

    def __init__(self, model: nn.Module, result: str, inputs: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.model = model
        self.result = result
        self.inputs = inputs

    def forward(self, *values: Tensor) -> Any:
        named = dict(zip(self.inputs, values, strict=False))
        return self.model(*values[len(named) :], **named)[self.result]


# Of the zoo: what the libraries below have not, such as layers over time and over volumes.
_OWN = (
    *("small_unet", "vae", "hourglass", "pixel_shuffle_reflect_pad", "r3d", "small_mlp", "vit"),
    *("lstm", "gru", "conv_tasnet", "wav2letter", "retinanet"),
)
_TORCHVISION = (
    *("mobilenet_v2", "mobilenet_v3_small", "resnet18", "resnext50_32x4d", "shufflenet_v2_x1_0"),
    *("squeezenet1_1", "efficientnet_b0", "regnet_y_400mf", "densenet121", "googlenet"),
    *("convnext_tiny", "swin_t", "lraspp_mobilenet_v3_large", "deeplabv3_mobilenet_v3_large"),
)
_TIMM = (
    *(
        "mobilenetv4_conv_small",
        "mobilevit_xxs",
        "ghostnet_100",
        "edgenext_xx_small",
        "fastvit_t8",
    ),
    *("levit_128s", "vit_tiny_patch16_224", "convnextv2_atto", "poolformer_s12", "mixer_s32_224"),
    "pvt_v2_b0",
)
_TEXT = {"vocab_size": 1000, "max_position_embeddings": 512}
_SMALL = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
}
_WIDE = {**_SMALL, "hidden_size": 256, "intermediate_size": 512}
_FEW_KEYS = {"num_key_value_heads": 2, "tie_word_embeddings": False}
_PICTURE = {"pixel_values": (1, 3, 96, 96)}
_BIG_PICTURE = {"pixel_values": (1, 3, 128, 128)}
_TOKENS = {"input_ids": 64}
_MORE_TOKENS = {"input_ids": 256}
_TRANSFORMERS: Mapping[str, tuple[str, str, dict[str, Any], dict[str, Any], str]] = {
    "bert": ("BertModel", "BertConfig", {**_TEXT, **_SMALL}, _TOKENS, "last_hidden_state"),
    "clip": (
        *("CLIPVisionModel", "CLIPVisionConfig"),
        {**_SMALL, "image_size": 96, "patch_size": 16},
        *(_PICTURE, "last_hidden_state"),
    ),
    "gpt2": (
        *("GPT2LMHeadModel", "GPT2Config"),
        {"vocab_size": 1000, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_inner": 256},
        *(_TOKENS, "logits"),
    ),
    "llama": (
        *("LlamaForCausalLM", "LlamaConfig"),
        *({**_TEXT, **_SMALL, **_FEW_KEYS}, _TOKENS, "logits"),
    ),
    "qwen3": (
        *("Qwen3ForCausalLM", "Qwen3Config"),
        {**_TEXT, **_SMALL, **_FEW_KEYS, "head_dim": 32},
        *(_TOKENS, "logits"),
    ),
    "t5": (
        *("T5EncoderModel", "T5Config"),
        {"vocab_size": 1000, "d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 2}
        | {"num_heads": 4},
        *(_TOKENS, "last_hidden_state"),
    ),
    "segformer": (
        *("SegformerForSemanticSegmentation", "SegformerConfig"),
        {"hidden_sizes": [16, 32, 64, 128], "depths": [1, 1, 1, 1], "decoder_hidden_size": 64},
        *(_BIG_PICTURE, "logits"),
    ),
    "whisper": (
        *("models.whisper.modeling_whisper.WhisperEncoder", "WhisperConfig"),
        {"d_model": 128, "encoder_layers": 2, "encoder_attention_heads": 4, "num_mel_bins": 80}
        | {"encoder_ffn_dim": 256, "max_source_positions": 100},
        *({"input_features": (1, 80, 200)}, "last_hidden_state"),
    ),
    "wav2vec2": (
        *("Wav2Vec2Model", "Wav2Vec2Config"),
        {**_SMALL, "conv_dim": [32] * 7, "num_conv_pos_embeddings": 16}
        | {"num_conv_pos_embedding_groups": 4},
        *({"input_values": (1, 8000)}, "last_hidden_state"),
    ),
    "mobilevit": (
        *("MobileViTModel", "MobileViTConfig"),
        {"image_size": 128},
        *(_BIG_PICTURE, "last_hidden_state"),
    ),
    "bert_256": ("BertModel", "BertConfig", {**_TEXT, **_WIDE}, _MORE_TOKENS, "last_hidden_state"),
    "llama_256": (
        *("LlamaForCausalLM", "LlamaConfig"),
        *({**_TEXT, **_WIDE, **_FEW_KEYS}, _MORE_TOKENS, "logits"),
    ),
}
NAMES: tuple[str, ...] = (
    *(f"torchvision/{name}" for name in _TORCHVISION),
    *(f"timm/{name}" for name in _TIMM),
    *(f"transformers/{name}" for name in _TRANSFORMERS),
    *(f"own/{name}" for name in _OWN),
)
"""All models: where they are from, and their names there."""


def build(name: str) -> Example:
    """Return a model in evaluation mode with random weights, and inputs.

    Raises:
        ImportError: The package that the model is from is not installed.
        RuntimeError: Its results are the same for other inputs, so that no error would show.
    """
    torch.manual_seed(0)
    origin, _, own = name.partition("/")
    model, inputs = {
        "torchvision": _of_torchvision,
        "timm": _of_timm,
        "transformers": _of_transformers,
        "own": _of_zoo,
    }[origin](own)
    _draw_zeros(model.eval())
    _give_statistics(model, inputs)
    check_dependence(name, model, inputs)
    return model, inputs


def _draw_zeros(model: nn.Module) -> None:
    """Draw heads and scales that begin at 0, or close to it: they hide all that is before them."""
    for name, part in model.named_parameters():
        if not name.endswith("bias") and float(part.detach().abs().max()) <= _HIDING:
            if part.numel() == max(part.shape):
                nn.init.uniform_(part, 0.1, 0.5)
            else:
                nn.init.normal_(part, std=0.05)


_HIDING = 1e-4
_SAMPLES = 4


def _give_statistics(model: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Give batch norms the statistics of what they see, as training would.

    With others what an input says is lost on the way, and results are those of biases alone.
    """
    norms = [
        part
        for part in model.modules()
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.running_mean is not None
    ]
    kept = [part.momentum for part in norms]
    for part in norms:
        part.train()
        part.momentum = None
        part.reset_running_stats()
    if norms:
        with torch.no_grad():
            drawn = [other_inputs(inputs) for _ in range(_SAMPLES)]
            model(*(torch.cat(same) for same in zip(*drawn, strict=True)))
    for part, momentum in zip(norms, kept, strict=True):
        part.eval()
        part.momentum = momentum


def other_inputs(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return inputs of the same sizes, drawn anew."""
    return tuple(
        torch.randn(one.shape) if one.is_floating_point() else torch.randint(0, 1000, one.shape)
        for one in inputs
    )


def check_dependence(name: str, model: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Refuse a model of which a result says nothing of its inputs.

    Raises:
        RuntimeError: A result changes by less than a hundredth of its largest number, or half of
            its numbers do not change.
    """
    with torch.no_grad():
        results = [pytree.tree_leaves(model(*given)) for given in (inputs, other_inputs(inputs))]
    for number, (first, second) in enumerate(zip(*results, strict=True)):
        if not isinstance(first, Tensor) or not first.is_floating_point():
            continue
        change = float((first - second).abs().max() / first.abs().max())
        same = float((first == second).float().mean())
        if not change >= _LEAST_CHANGE or same > _MOST_SAME:
            raise RuntimeError(
                f"result {number} of {name} changes by {change:.1e} of its largest number, and "
                f"{same:.0%} of it not at all, with other inputs: no error of what comes first "
                "would show; draw its weights otherwise"
            )


_LEAST_CHANGE = 0.01
_MOST_SAME = 0.5


def _of_zoo(name: str) -> Example:
    program = zoo.program(name)
    return program.build(), program.inputs()[0]


def _of_torchvision(name: str) -> Example:
    model, inputs = _of_zoo(f"torchvision_{name}")
    if name.startswith(("deeplab", "lraspp")):
        return Result(model, "out"), (torch.randn(1, 3, 128, 128),)
    return model, inputs


def _of_timm(name: str) -> Example:
    return _of_zoo(f"timm_{name}")


def _of_transformers(name: str) -> Example:
    import_torchvision()
    transformers = importlib.import_module("transformers")
    path, config, settings, sizes, result = _TRANSFORMERS[name]
    folder, _, kind = path.rpartition(".")
    place = importlib.import_module(f"transformers.{folder}") if folder else transformers
    made = getattr(transformers, config)(**settings)
    made._attn_implementation = "eager" if name == "mobilevit" else "sdpa"
    if hasattr(made, "use_cache"):
        made.use_cache = False
    model = getattr(place, kind)(made)
    inputs = tuple(
        torch.randint(0, 1000, (1, size)) if isinstance(size, int) else torch.randn(size)
        for size in sizes.values()
    )
    return Result(model, result, tuple(sizes)), inputs
