"""Pass channels-last images to OpenVINO, which has no memory formats."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from openvino import Output, Type, opset13

from lowerdeck.torch_base import is_channels_last

# Suffix of the names of channels-last results.
CHANNELS_LAST = "channels_last"


def whole(numbers: int | Sequence[int]) -> Output:
    """Return integers as a constant."""
    return opset13.constant(numbers, Type.i64).output(0)


def memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor with its dimensions in memory order, as the runtime passes it."""
    if not is_channels_last(tensor):
        return tensor.contiguous()
    order = (0, *range(2, tensor.dim()), 1)
    return tensor.permute(order).reshape(tensor.shape)


def from_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return the channels-last tensor of a view made by ``memory_order``."""
    batch, channels, *image = tensor.shape
    order = (0, tensor.dim() - 1, *range(1, tensor.dim() - 1))
    return tensor.reshape(batch, *image, channels).permute(order)


def with_channels_first(value: Output) -> Output:
    """Transpose a channels-last parameter of the model to torch's order of dimensions.

    Args:
        value: A parameter with torch's sizes.
    """
    batch, channels, *image = value.get_shape()
    lying = opset13.reshape(value, whole([batch, *image, channels]), special_zero=False)
    rank = len(image) + 2
    return opset13.transpose(lying, whole([0, rank - 1, *range(1, rank - 1)])).output(0)


def with_channels_last(value: Output) -> Output:
    """Transpose a result of the model to channels-last bytes, with torch's sizes.

    Args:
        value: A value with dimensions in torch's order.
    """
    sizes = list(value.get_shape())
    moved = opset13.transpose(value, whole([0, *range(2, len(sizes)), 1]))
    return opset13.reshape(moved, whole(sizes), special_zero=False).output(0)
