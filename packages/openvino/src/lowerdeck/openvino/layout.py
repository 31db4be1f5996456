"""Convert channels-last tensors for OpenVINO, which has no memory formats."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from openvino import Output, Type, opset13

from lowerdeck.torch_base import is_channels_last

# Suffix of the names of channels-last results.
CHANNELS_LAST = "channels_last"


def ints(numbers: int | Sequence[int]) -> Output:
    """Return an int64 constant."""
    return opset13.constant(numbers, Type.i64).output(0)


def memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor of the same sizes; channels-last data keeps its memory order."""
    if not is_channels_last(tensor):
        return tensor.contiguous()
    order = (0, *range(2, tensor.dim()), 1)
    return tensor.permute(order).reshape(tensor.shape)


def from_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """Invert ``memory_order`` for a channels-last tensor."""
    batch, channels, *image = tensor.shape
    order = (0, tensor.dim() - 1, *range(1, tensor.dim() - 1))
    return tensor.reshape(batch, *image, channels).permute(order)


def with_channels_first(value: Output) -> Output:
    """Return a channels-last model parameter in torch's dimension order.

    Args:
        value: Parameter with torch's sizes.
    """
    batch, channels, *image = value.get_shape()
    channels_last = opset13.reshape(value, ints([batch, *image, channels]), special_zero=False)
    rank = len(image) + 2
    return opset13.transpose(channels_last, ints([0, rank - 1, *range(1, rank - 1)])).output(0)


def with_channels_last(value: Output) -> Output:
    """Return a model result with channels-last memory and torch's sizes.

    Args:
        value: Value in torch's dimension order.
    """
    sizes = list(value.get_shape())
    moved = opset13.transpose(value, ints([0, *range(2, len(sizes)), 1]))
    return opset13.reshape(moved, ints(sizes), special_zero=False).output(0)
