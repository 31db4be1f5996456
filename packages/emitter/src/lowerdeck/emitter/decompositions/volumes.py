"""Decompose 3-D convolutions into 2-D convolutions.

The kernel has ``taps`` slices along the depth. A convolution stacks the ``taps`` slices of each
window along the channels: one image for each depth of the result. A transposed convolution
computes ``taps`` images for each input slice and adds them at the depths where they overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (the name that everyone knows)

from lowerdeck.torch_base import OpOverload

_ATEN = torch.ops.aten


def convolution(
    input: torch.Tensor,  # noqa: A002 - the name in the schema
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Any:
    """Return a 3-D convolution, computed by a 2-D one.

    Args:
        input: The volume, shape (batch, channels, depth, height, width).
        weight: The weight, shape (outputs, channels / groups, *kernel); of a transposed
            convolution (channels, outputs / groups, *kernel).
        stride: Step along each dimension, or one for all.
        padding: Zeros around the volume; for a transposed convolution, the elements cropped at
            each side.
        dilation: Distance between the taps of the kernel.
        output_padding: Elements that a transposed convolution adds at the end of each dimension.
    """
    if input.dim() != 5:
        return NotImplemented
    settings = [three(amounts) for amounts in (stride, padding, dilation, output_padding)]
    in_depth, in_plane = (
        [setting[0] for setting in settings],
        [setting[1:] for setting in settings],
    )
    compute = _convolve_transposed if transposed else _convolve
    return compute(input, weight, bias, in_depth, in_plane, groups)


def conv3d(
    input: torch.Tensor,  # noqa: A002 - the name in the schema
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    groups: int = 1,
) -> Any:
    """Return ``conv3d``, computed by a 2-D convolution."""
    return convolution(input, weight, bias, stride, padding, dilation, False, (0,), groups)


def _convolve(
    volume: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    in_depth: Sequence[int],
    in_plane: Sequence[Sequence[int]],
    groups: int,
) -> torch.Tensor:
    """Return a 3-D convolution, computed on images with ``channels * taps`` channels.

    Args:
        in_depth: Stride, padding, dilation and output padding along the depth.
        in_plane: Stride, padding, dilation and output padding along height and width.
    """
    (stride, padding, dilation, _), taps = in_depth, weight.size(2)
    # With dynamic sizes, torch adds fewer guards for these operators than for composite ones.
    slices = _ATEN.permute.default(volume, [0, 2, 1, 3, 4])
    if padding:
        slices = F.pad(slices, (0, 0) * 3 + (padding, padding))
    if taps == stride and dilation == groups == 1:
        # Windows that do not overlap, such as patches of a video: their slices are adjacent.
        depth = slices.size(1) // taps
        # With dynamic sizes, only a copy can be reshaped for every length.
        slices = _ATEN.slice.Tensor(slices, 1, 0, depth * taps)
        images = _ATEN.clone.default(slices, memory_format=torch.contiguous_format)
        weight = weight.transpose(1, 2)
    else:
        depth = (slices.size(1) - dilation * (taps - 1) - 1) // stride + 1
        ends = [tap * dilation + (depth - 1) * stride + 1 for tap in range(taps)]
        parts = [slices[:, tap * dilation : ends[tap] : stride] for tap in range(taps)]
        # Channel c of the volume becomes the channels c * taps to c * taps + taps - 1 of an
        # image: the order in which the weight is stored.
        images = torch.stack(parts, 3) if taps > 1 else parts[0]
    batch, (height, width) = volume.size(0), volume.shape[3:]
    split = _ATEN.view.default if taps > 1 else _ATEN.reshape.default
    images = split(images, [-1, volume.size(1) * taps, height, width])
    kernel = weight.reshape(weight.size(0), -1, *weight.shape[3:])
    convolved: torch.Tensor = _ATEN.convolution.default(
        images, kernel, bias, *in_plane[:3], False, [0, 0], groups
    )
    pixels = _ATEN.permute.default(convolved, [0, 2, 3, 1])
    pixels = _ATEN.clone.default(pixels, memory_format=torch.contiguous_format)
    pixels = _ATEN.view.default(pixels, [batch, depth, *pixels.shape[1:]])
    result: torch.Tensor = _ATEN.permute.default(pixels, [0, 4, 1, 2, 3])
    return result.clone(memory_format=torch.contiguous_format)


def _convolve_transposed(
    volume: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    in_depth: Sequence[int],
    in_plane: Sequence[Sequence[int]],
    groups: int,
) -> torch.Tensor:
    """Return a transposed convolution: the sum along the depth of 2-D ones of the slices."""
    (stride, padding, dilation, output_padding), taps = in_depth, weight.size(2)
    batch, channels, depth, height, width = volume.shape
    images = volume.transpose(1, 2).reshape(batch * depth, channels, height, width)
    kernel = weight.reshape(channels, weight.size(1) * taps, *weight.shape[3:])
    convolved = _ATEN.convolution.default(
        images, kernel, None, *in_plane[:3], True, in_plane[3], groups
    )
    outputs, (high, wide) = weight.size(1) * groups, convolved.shape[2:]
    convolved = convolved.reshape(batch, depth, outputs, taps, high, wide)
    length = (depth - 1) * stride + 1 + dilation * (taps - 1) + output_padding
    total: torch.Tensor | None = None
    for tap in range(taps):
        part = convolved[:, :, :, tap]
        if stride > 1:
            # Insert stride - 1 slices of zeros between the slices.
            spread = F.pad(part.unsqueeze(2), (0, 0) * 3 + (0, stride - 1))
            part = spread.reshape(batch, depth * stride, outputs, high, wide)
            part = part[:, : (depth - 1) * stride + 1]
        before = tap * dilation
        after = length - before - (depth - 1) * stride - 1
        part = F.pad(part, (0, 0) * 3 + (before, after))
        total = part if total is None else total + part
    assert total is not None
    result = total[:, padding : length - padding].transpose(1, 2)
    return result if bias is None else result + bias.reshape(-1, 1, 1, 1)


def three(amounts: Sequence[int]) -> list[int]:
    """Return the amount of each of three dimensions, given one for all or one for each."""
    return list(amounts) * 3 if len(amounts) == 1 else list(amounts)


VOLUMES: dict[OpOverload, Callable[..., Any]] = {
    _ATEN.convolution.default: convolution,
}
