"""The float32 models that the XNNPACK backends are compared on, made from configurations alone.

torchvision, timm and transformers are imported when one of their models is asked for; where they
are missing, the comparison says so and goes on.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import lowerdeck_zoo as zoo
from lowerdeck_zoo.models.libraries import import_torchvision
from lowerdeck_zoo.models.small_configs import SMALL_SIZES, small_config
from lowerdeck_zoo.models.transformers_small import First

Example = tuple[nn.Module, tuple[Any, ...]]


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
# Of the zoo, with an encoder and a decoder as wide as small models that people use.
_TRANSFORMERS = (
    *("CLIPVisionModel", "GPT2LMHeadModel", "Qwen3ForCausalLM", "T5ForConditionalGeneration"),
    *("SegformerForSemanticSegmentation", "WhisperForConditionalGeneration", "Wav2Vec2ForCTC"),
    *("ViTModel", "SwinModel", "bert_256", "llama_256"),
)
_WIDE = {
    "bert_256": ("BertModel", "BertConfig"),
    "llama_256": ("LlamaForCausalLM", "LlamaConfig"),
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
        torch.randn(one.shape) if one.is_floating_point() else torch.randint(0, 99, one.shape)
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
        lifted = zoo.Of(lambda self, x: self.model(x)["out"], model=model)
        return lifted, (torch.randn(1, 3, 128, 128),)
    return model, inputs


def _of_timm(name: str) -> Example:
    return _of_zoo(f"timm_{name}")


def _of_transformers(name: str) -> Example:
    if name not in _WIDE:
        return _of_zoo(f"transformers_{name}")
    import_torchvision()
    transformers = importlib.import_module("transformers")
    kind, config = (getattr(transformers, one) for one in _WIDE[name])
    sizes = {**SMALL_SIZES, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 1000}
    sizes |= {"max_position_embeddings": 512, "tie_word_embeddings": False, "use_cache": False}
    options = {"use_cache": False} if name == "llama_256" else {}
    model = First(kind(small_config(config, sizes)), ("input_ids",), options)
    return model, (torch.randint(0, 1000, (1, 256)),)
