"""Decompose 3-D convolutions into 2-D convolutions."""

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
    """Return a 3-D convolution as a 2-D one whose channels include the depth.

    Args:
        input: The volume, shape (batch, channels, depth, height, width).
        weight: The weight, shape (outputs, channels / groups, *kernel); of a transposed
            convolution (channels, outputs / groups, *kernel).
        stride: Step along each dimension, or one for all.
        padding: Zeros around the volume; of a transposed convolution the number cut off.
        dilation: Distance between the taps of the kernel.
        transposed: Whether this is a transposed convolution.
        output_padding: Elements that a transposed convolution adds at the end.
        groups: Number of groups of channels.
    """
    if input.dim() != 5:
        return NotImplemented
    whole = (stride, padding, dilation, output_padding)
    along, across = zip(*(_parted(item) for item in whole), strict=True)
    compute = _transposed if transposed else _plain
    return compute(input, weight, bias, along, across, groups)


def conv3d(
    input: torch.Tensor,  # noqa: A002 - the name in the schema
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    groups: int = 1,
) -> Any:
    """Return a 3-D convolution as a 2-D one, in the layout that later calls were recorded with."""
    result = convolution(input, weight, bias, stride, padding, dilation, False, (0,), groups)
    return (
        result if result is NotImplemented else result.clone(memory_format=torch.contiguous_format)
    )


def _plain(
    volume: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    along: Sequence[int],
    across: Sequence[Sequence[int]],
    groups: int,
) -> torch.Tensor:
    """Return a convolution as a 2-D one, with all frames that a result needs as channels."""
    (stride, padding, dilation, _), taps = along, weight.size(2)
    frames = volume.transpose(1, 2)
    if padding:
        frames = F.pad(frames, (0, 0) * 3 + (padding, padding))
    depth = (frames.size(1) - dilation * (taps - 1) - 1) // stride + 1
    if taps == stride and dilation == groups == 1:
        # Patches of a video: their frames follow each other in memory.
        depth = frames.size(1) // taps
        # With dynamic sizes, only a copy is a view for every length.
        frames = _ATEN.slice.Tensor(frames, 1, 0, depth * taps)
        images = frames.clone(memory_format=torch.contiguous_format)
        weight = weight.transpose(1, 2)
    else:
        ends = [tap * dilation + (depth - 1) * stride + 1 for tap in range(taps)]
        parts = [frames[:, tap * dilation : ends[tap] : stride] for tap in range(taps)]
        # Channel c of the volume becomes the channels c * taps to c * taps + taps - 1 of an
        # image, the order in which the weight is stored already.
        images = torch.stack(parts, 3) if taps > 1 else parts[0]
    batch, (height, width) = volume.size(0), volume.shape[3:]
    images = images.reshape(-1, volume.size(1) * taps, height, width)
    kernel = weight.reshape(weight.size(0), -1, *weight.shape[3:])
    convolved: torch.Tensor = _ATEN.convolution.default(
        images, kernel, bias, across[0], across[1], across[2], False, [0, 0], groups
    )
    pixels = convolved.permute(0, 2, 3, 1)
    return pixels.reshape(batch, depth, *pixels.shape[1:]).permute(0, 4, 1, 2, 3)


def _transposed(
    volume: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    along: Sequence[int],
    across: Sequence[Sequence[int]],
    groups: int,
) -> torch.Tensor:
    """Return a transposed convolution as a 2-D one; add its results, which overlap in depth."""
    (stride, padding, dilation, output_padding), taps = along, weight.size(2)
    batch, channels, depth, height, width = volume.shape
    images = volume.transpose(1, 2).reshape(batch * depth, channels, height, width)
    kernel = weight.reshape(channels, weight.size(1) * taps, *weight.shape[3:])
    convolved = _ATEN.convolution.default(
        images, kernel, None, across[0], across[1], across[2], True, across[3], groups
    )
    outputs, (high, wide) = weight.size(1) * groups, convolved.shape[2:]
    convolved = convolved.reshape(batch, depth, outputs, taps, high, wide)
    length = (depth - 1) * stride + 1 + dilation * (taps - 1) + output_padding
    total: torch.Tensor | None = None
    for tap in range(taps):
        part = convolved[:, :, :, tap]
        if stride > 1:
            # Zeros between the frames, none after the last one.
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


def _parted(amounts: Sequence[int]) -> tuple[int, list[int]]:
    """Split per-dimension settings into that of the depth and those of height and width."""
    three = list(amounts) * 3 if len(amounts) == 1 else list(amounts)
    return three[0], three[1:]


VOLUMES: dict[OpOverload, Callable[..., Any]] = {
    _ATEN.convolution.default: convolution,
}
