"""Decompose 3-D pools and adaptive max pools into pools of fewer dimensions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lowerdeck.emitter.decompositions.volumes import three
from lowerdeck.torch_base import OpOverload

_ATEN = torch.ops.aten


def average_pool(
    self: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    """Return ``avg_pool3d`` as two 2-D pools.

    Args:
        self: The volume, shape (..., depth, height, width).
        kernel_size: Size of a window along each dimension.
        stride: Stride of the windows; the kernel size if empty.
        padding: Zeros around the volume.
        ceil_mode: Whether windows may extend beyond the end.
        divisor_override: Divisor of the sums; the number of elements by default.
    """
    if not self.is_floating_point():
        # An average of averages would be rounded twice.
        return NotImplemented
    kernel, strides, paddings = (
        three(amounts) for amounts in (kernel_size, stride or kernel_size, padding)
    )
    flags = (ceil_mode, count_include_pad)
    second = None if divisor_override is None else 1
    images = _ATEN.avg_pool2d.default(
        _images(self), kernel[1:], strides[1:], paddings[1:], *flags, divisor_override
    )
    high, wide = images.shape[2:]
    rows = images.reshape(-1, 1, self.size(-3), high * wide)
    rows = _ATEN.avg_pool2d.default(
        rows, [kernel[0], 1], [strides[0], 1], [paddings[0], 0], *flags, second
    )
    return rows.reshape(*self.shape[:-3], rows.size(2), high, wide)


def adaptive_average_pool(self: torch.Tensor, output_size: Sequence[int]) -> Any:
    """Return ``_adaptive_avg_pool3d`` as two 2-D pools.

    Args:
        self: The volume, shape (..., depth, height, width).
        output_size: Number of windows along each dimension.
    """
    deep, high, wide = output_size
    images = _ATEN._adaptive_avg_pool2d.default(_images(self), [high, wide])
    rows = images.reshape(-1, 1, self.size(-3), high * wide)
    rows = _ATEN._adaptive_avg_pool2d.default(rows, [deep, high * wide])
    return rows.reshape(*self.shape[:-3], deep, high, wide)


def max_pool(
    self: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``max_pool3d_with_indices`` as two 2-D pools.

    Args:
        self: The volume, shape (..., depth, height, width).
        kernel_size: Size of a window along each dimension.
        stride: Stride of the windows; the kernel size if empty.
        padding: Number of elements by which windows extend beyond the edges.
        dilation: Distance between the elements of a window.
        ceil_mode: Whether windows may extend beyond the end.
    """
    amounts = (kernel_size, stride or kernel_size, padding, dilation)
    size, strides, paddings, dilations = (three(amount) for amount in amounts)
    depth, height, width = self.shape[-3:]
    images, indices = _ATEN.max_pool2d_with_indices.default(
        _images(self), size[1:], strides[1:], paddings[1:], dilations[1:], ceil_mode
    )
    high, wide = images.shape[2:]
    rows, frames = _ATEN.max_pool2d_with_indices.default(
        images.reshape(-1, 1, depth, high * wide),
        *([size[0], 1], [strides[0], 1], [paddings[0], 0], [dilations[0], 1]),
        ceil_mode,
    )
    # Like the 3-D pool, both pools select the first of equal elements.
    chosen = frames.reshape(rows.size(0), -1)
    inner = torch.gather(indices.reshape(rows.size(0), -1), 1, chosen)
    outer = torch.div(chosen, high * wide, rounding_mode="floor")
    shape = (*self.shape[:-3], rows.size(2), high, wide)
    return rows.reshape(shape), (outer * (height * width) + inner).reshape(shape)


def adaptive_max_pool(
    self: torch.Tensor, output_size: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``adaptive_max_pool2d`` or ``adaptive_max_pool3d``, by one dimension at a time.

    Args:
        self: The images or volumes; the last ``len(output_size)`` dimensions are pooled.
        output_size: Number of windows along each dimension.
    """
    values, indices = self, None
    for dim, count in zip(range(-1, -len(output_size) - 1, -1), output_size[::-1], strict=True):
        values, along = _largest(values, dim, count)
        if indices is None:
            indices, inner = along, self.size(dim)
        else:
            indices = torch.gather(indices, dim, along) + along * inner
            inner = inner * self.size(dim)
    assert indices is not None
    return values, indices


def _largest(values: torch.Tensor, dim: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the maxima of ``count`` windows along ``dim``, and their indices along it."""
    size = values.size(dim)
    if count == 1:
        return torch.max(values, dim, True)
    maxima = []
    for index in range(count):
        start, stop = index * size // count, -(-(index + 1) * size // count)
        part, inside = torch.max(torch.narrow(values, dim, start, stop - start), dim, True)
        maxima.append((part, inside + start))
    parts, indices = zip(*maxima, strict=True)
    return torch.cat(parts, dim), torch.cat(indices, dim)


def _images(volume: torch.Tensor) -> torch.Tensor:
    """Return a volume as a batch of images with the depth as channels."""
    return volume.reshape(-1, *volume.shape[-3:])


POOLS: dict[OpOverload, Callable[..., Any]] = {
    _ATEN.avg_pool3d.default: average_pool,
    _ATEN.max_pool3d_with_indices.default: max_pool,
    _ATEN._adaptive_avg_pool3d.default: adaptive_average_pool,
    _ATEN.adaptive_max_pool2d.default: adaptive_max_pool,
    _ATEN.adaptive_max_pool3d.default: adaptive_max_pool,
}
