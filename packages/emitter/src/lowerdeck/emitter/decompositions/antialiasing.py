"""Antialiased image resizing as matrix products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lowerdeck.torch_base import OpOverload

_ATEN = torch.ops.aten
# Coefficient of Keys' cubic with antialiasing; without it torch uses -0.75.
_CURVE = -0.5
_REACH = 2.0


def bicubic(
    self: torch.Tensor,
    output_size: Sequence[Any],
    align_corners: bool,
    scales_h: float | None = None,
    scales_w: float | None = None,
) -> Any:
    """Return a bicubic resize: output rows and columns are weighted sums of input ones."""
    sizes = (*self.shape[-2:], *output_size)
    if not all(isinstance(size, int) for size in sizes) or self.dtype != torch.float32:
        return NotImplemented
    height, width, new_height, new_width = sizes
    down = _weights(height, new_height, _scale(height, new_height, align_corners, scales_h))
    across = _weights(width, new_width, _scale(width, new_width, align_corners, scales_w))
    return torch.matmul(down, torch.matmul(self, across.t()))


def bilinear(
    self: torch.Tensor,
    output_size: Sequence[Any],
    align_corners: bool,
    scales_h: float | None = None,
    scales_w: float | None = None,
) -> Any:
    """Return a bilinear resize of uint8 images, computed in float32.

    Like torch, resize and round the width first, then the height.
    """
    if self.dtype != torch.uint8:
        return NotImplemented
    resize = _ATEN._upsample_bilinear2d_aa.default
    image = self.to(torch.float32)
    # The kernel accepts scale factors only if both are given.
    across = (None, None) if scales_w is None else (1.0, scales_w)
    image = resize(image, [image.size(2), output_size[1]], align_corners, *across)
    image = torch.floor(image + 0.5)
    down = (None, None) if scales_h is None else (scales_h, 1.0)
    image = resize(image, [output_size[0], image.size(3)], align_corners, *down)
    return torch.floor(image + 0.5).to(torch.uint8)


def _scale(size: int, new: int, align_corners: bool, factor: float | None) -> float:
    if align_corners:
        return (size - 1) / (new - 1) if new > 1 else 0.0
    return 1.0 / factor if factor is not None and factor > 0 else size / new


def _weights(size: int, new: int, scale: float) -> torch.Tensor:
    """Return the interpolation matrix, shape (new, size)."""
    stretch = max(scale, 1.0)
    center = (torch.arange(new, dtype=torch.float32).unsqueeze(1) + 0.5) * scale
    position = torch.arange(size, dtype=torch.float32).unsqueeze(0)
    first = torch.trunc(center - _REACH * stretch + 0.5)
    after = torch.trunc(center + _REACH * stretch + 0.5)
    curve = _cubic(torch.abs((position - center + 0.5) / stretch))
    weights = torch.where((position >= first) & (position < after), curve, 0.0)
    return weights / weights.sum(1, keepdim=True)


def _cubic(x: torch.Tensor) -> torch.Tensor:
    near = ((_CURVE + 2.0) * x - (_CURVE + 3.0)) * x * x + 1.0
    far = (((x - 5.0) * x + 8.0) * x - 4.0) * _CURVE
    return torch.where(x < 1.0, near, torch.where(x < _REACH, far, 0.0))


ANTIALIASING: dict[OpOverload, Callable[..., Any]] = {
    _ATEN._upsample_bicubic2d_aa.default: bicubic,
    _ATEN._upsample_bilinear2d_aa.default: bilinear,
}
