"""Three-dimensional grid sampling; the kernel takes only images."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from lowerdeck.torch_base import OpOverload

_ATEN = torch.ops.aten
# torch's enum values of the modes.
_NEAREST = 1
_ZEROS, _BORDER = 0, 1


def grid_sample(
    input: torch.Tensor,  # noqa: A002 - the name in the schema
    grid: torch.Tensor,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
) -> torch.Tensor:
    """Return ``grid_sampler_3d`` as a weighted sum of gathered elements.

    Args:
        input: The volume, shape (batch, channels, depth, height, width).
        grid: The positions, shape (batch, ..., 3): width, height and depth, from -1 to 1.
        interpolation_mode: 0 for trilinear, 1 for nearest.
        padding_mode: Values outside: 0 for zeros, 1 for the border, 2 for the reflected volume.
        align_corners: Whether -1 and 1 are the centres of the outermost elements.
    """
    batch, channels = input.shape[:2]
    sizes = [input.size(4), input.size(3), input.size(2)]
    positions = [
        _unscaled(grid[..., axis], size, padding_mode, align_corners)
        for axis, size in enumerate(sizes)
    ]
    flat, shape = input.reshape(batch, channels, -1), grid.shape[1:4]
    if interpolation_mode == _NEAREST:
        samples = _elements(flat, [torch.round(position) for position in positions], sizes)
        return samples.reshape(batch, channels, *shape)
    low = [torch.floor(position) for position in positions]
    total = torch.zeros((batch, channels, shape.numel()), dtype=input.dtype)
    for corner in itertools.product((0, 1), repeat=3):
        near = [start + offset for start, offset in zip(low, corner, strict=True)]
        weight = torch.ones_like(positions[0])
        for position, start, offset in zip(positions, low, corner, strict=True):
            weight = weight * (position - start if offset else start + 1 - position)
        total = total + _elements(flat, near, sizes) * weight.reshape(batch, 1, -1)
    return total.reshape(batch, channels, *shape)


def _unscaled(position: torch.Tensor, size: int, padding_mode: int, corners: bool) -> torch.Tensor:
    """Return positions in units of elements, clipped or reflected as the padding mode requires."""
    coordinate = (position + 1) * ((size - 1) / 2) if corners else ((position + 1) * size - 1) / 2
    if padding_mode == _ZEROS:
        return coordinate
    if padding_mode != _BORDER:
        coordinate = (
            _mirrored(coordinate, 0.0, size - 1.0)
            if corners
            else _mirrored(coordinate, -0.5, size)
        )
    return torch.clamp(coordinate, 0, size - 1)


def _mirrored(position: torch.Tensor, low: float, span: float) -> torch.Tensor:
    if span == 0:
        return torch.zeros_like(position)
    distance = torch.abs(position - low)
    offset = torch.fmod(distance, span)
    reflections = torch.floor(distance / span)
    return torch.where(torch.fmod(reflections, 2) == 0, offset + low, span - offset + low)


def _elements(flat: torch.Tensor, near: list[torch.Tensor], sizes: list[int]) -> torch.Tensor:
    """Return elements at integer positions, zeros outside; shape (batch, channels, positions)."""
    inside = torch.ones_like(near[0], dtype=torch.bool)
    flat_index = torch.zeros_like(near[0], dtype=torch.int64)
    for along, size in zip(near[::-1], sizes[::-1], strict=True):
        inside = inside & (along >= 0) & (along <= size - 1)
        flat_index = flat_index * size + torch.clamp(along, 0, size - 1).to(torch.int64)
    batch = flat.size(0)
    index = flat_index.reshape(batch, 1, -1).expand(
        batch, flat.size(1), flat_index.numel() // batch
    )
    elements = torch.gather(flat, 2, index)
    return torch.where(inside.reshape(batch, 1, -1), elements, 0.0)


GRIDS: dict[OpOverload, Callable[..., Any]] = {_ATEN.grid_sampler_3d.default: grid_sample}
