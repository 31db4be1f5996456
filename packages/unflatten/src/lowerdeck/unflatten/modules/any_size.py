"""Layers of torch's own that run the same operators whatever size they are given."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.fx import Node

from lowerdeck.torch_base import arguments_of
from lowerdeck.unflatten._torch_private import packet_name

_MODULES = "torch.nn.modules."
_ANY_SIZE: dict[str, tuple[str, ...]] = {
    "linear.Identity": (),
    "linear.Linear": ("linear",),
    "sparse.Embedding": ("embedding",),
    "flatten.Flatten": ("flatten",),
    "normalization.LayerNorm": ("layer_norm",),
    "normalization.RMSNorm": ("rms_norm",),
    "normalization.GroupNorm": ("group_norm",),
    "dropout.Dropout": ("dropout",),
    "dropout.AlphaDropout": ("alpha_dropout",),
    "pixelshuffle.PixelShuffle": ("pixel_shuffle",),
    "pixelshuffle.PixelUnshuffle": ("pixel_unshuffle",),
    "channelshuffle.ChannelShuffle": ("channel_shuffle",),
    "container.Sequential": (),
    **{
        f"activation.{name}": (operator,)
        for name, operator in {
            "CELU": "celu",
            "ELU": "elu",
            "GELU": "gelu",
            "GLU": "glu",
            "Hardshrink": "hardshrink",
            "Hardsigmoid": "hardsigmoid",
            "Hardswish": "hardswish",
            "Hardtanh": "hardtanh",
            "LeakyReLU": "leaky_relu",
            "LogSigmoid": "log_sigmoid",
            "LogSoftmax": "log_softmax",
            "Mish": "mish",
            "PReLU": "prelu",
            "ReLU": "relu",
            "ReLU6": "hardtanh",
            "RReLU": "rrelu",
            "SELU": "selu",
            "SiLU": "silu",
            "Sigmoid": "sigmoid",
            "Softmax": "softmax",
            "Softmax2d": "softmax",
            "Softplus": "softplus",
            "Softshrink": "softshrink",
            "Tanh": "tanh",
            "Threshold": "threshold",
        }.items()
    },
    "activation.Softmin": ("neg", "softmax"),
    "activation.Softsign": ("abs", "add", "div"),
    "activation.Tanhshrink": ("tanh", "sub"),
    **{
        f"{path}{rank}d": (f"{operator}{rank}d",)
        for rank in (1, 2, 3)
        for path, operator in {
            "conv.Conv": "conv",
            "conv.ConvTranspose": "conv_transpose",
            "pooling.AvgPool": "avg_pool",
            "pooling.MaxPool": "max_pool",
            "pooling.AdaptiveAvgPool": "adaptive_avg_pool",
        }.items()
    },
    **{f"batchnorm.BatchNorm{rank}d": ("batch_norm",) for rank in (1, 2, 3)},
    **{
        f"padding.{kind}Pad{rank}d": ("pad",)
        for rank in (1, 2, 3)
        for kind in ("Circular", "Constant", "Reflection", "Replication", "Zero")
    },
}
"""What each computes, without what is written in place; a softmax, a pool or a batch norm may yet
have looked at a size."""


def computes_any_size(type_name: str | None, nodes: Collection[Node], given: int) -> bool:
    """Return whether a module of torch's own is known to look at no size, type or constant.

    Args:
        type_name: The qualified name of its class.
        nodes: What it computes itself.
        given: How many values it is given.
    """
    wanted = _ANY_SIZE.get((type_name or "").removeprefix(_MODULES))
    if wanted is None or given != 1:
        return False
    steps = [node for node in nodes if node.op == "call_function"]
    # An alias is what is returned as it was given, which is so of any size.
    steps = [node for node in steps if node.target is not torch.ops.aten.alias.default]
    operators = tuple([str(packet_name(node.target)).removesuffix("_") for node in steps])
    return operators == wanted and not any(map(_looked_at_size, steps))


def _looked_at_size(node: Node) -> bool:
    """Return whether an argument of a step may have been chosen by the size of its input."""
    operator = packet_name(node.target)
    if operator not in {
        "softmax",
        "log_softmax",
        "adaptive_avg_pool2d",
        "adaptive_avg_pool3d",
        "batch_norm",
    }:
        return False
    arguments = arguments_of(node)
    example = node.all_input_nodes[0].meta.get("val")
    if not isinstance(example, torch.Tensor):
        return True
    if operator == "batch_norm":
        # While it trains, it refuses single values.
        return bool(arguments["training"])
    if operator in {"softmax", "log_softmax"}:
        # torch.nn chooses one by the rank where a module was made without.
        return bool(arguments["dim"] == (0 if example.dim() in {0, 1, 3} else 1))
    # None stands for the input's own size, which may vary.
    sizes = arguments["output_size"]
    given = example.shape[-len(sizes) :]
    return any(
        type(size) is not int or (type(own) is int and size == own)
        for size, own in zip(sizes, given, strict=True)
    )
