"""Decompose cumulative products, maxima and minima: only ``cumsum`` has a kernel.

Each is a scan by doubling: after step k every element holds the result over the last 2 ** k
elements up to itself. So n elements take log2(n) elementwise steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lowerdeck.emitter.decompositions.quirks import RANGES
from lowerdeck.torch_base import OpOverload, size_range, varies

_ATEN = torch.ops.aten
Joined = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], Sequence[torch.Tensor]]


def running_product(self: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    """Return ``cumprod`` as a scan by doubling.

    Args:
        dtype: Dtype of the result; int64 for integers when None.
    """
    wide = self.dtype if self.is_floating_point() else torch.int64
    values = self.to(wide if dtype is None else dtype)
    products = _doubled([values], dim, lambda before, now: [before[0] * now[0]])
    return products if products is NotImplemented else products[0]


def running_maximum(self: torch.Tensor, dim: int) -> Any:
    """Return ``cummax`` as a scan by doubling."""
    return _extremes(self, dim, torch.ge)


def running_minimum(self: torch.Tensor, dim: int) -> Any:
    """Return ``cummin`` as a scan by doubling."""
    return _extremes(self, dim, torch.le)


def _extremes(self: torch.Tensor, dim: int, beats: Callable[..., torch.Tensor]) -> Any:
    if self.dim() == 0:
        return self.clone(), torch.zeros((), dtype=torch.int64)

    def join(
        before: Sequence[torch.Tensor], now: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        chosen = beats(now[0], before[0])
        if self.is_floating_point():
            # NaN wins over all numbers, and the last NaN over earlier ones.
            chosen = (chosen & ~torch.isnan(before[0])) | torch.isnan(now[0])
        return [torch.where(chosen, new, old) for old, new in zip(before, now, strict=True)]

    shape = [1] * self.dim()
    shape[dim] = -1
    indices = torch.arange(self.size(dim)).reshape(shape).expand(self.shape)
    if varies(self.size(dim)):
        return _dynamically_doubled([self, indices], dim, join)
    return _doubled([self, indices], dim, join)


def _dynamically_doubled(values: Sequence[torch.Tensor], dim: int, join: Joined) -> Any:
    """Return the scan of ``values`` along a dynamic dimension; ``join`` must be idempotent.

    Each step joins every element with the one ``distance`` before it, or with element 0 if there
    is none. Element 0 is then included twice, which does not change an idempotent operation.
    """
    size = values[0].size(dim)
    bound = size_range(size, RANGES.get())[1]
    if bound is None:
        return NotImplemented
    distance = 1
    axes: list[Any] = [slice(None)] * (dim % values[0].dim())
    while distance < bound:
        before = (torch.arange(size) - distance).clamp(min=0)
        values = join([value[*axes, before] for value in values], values)
        distance *= 2
    return values


def _doubled(values: list[torch.Tensor], dim: int, join: Joined) -> Any:
    """Return the scan of ``values`` along ``dim`` with the operation ``join``."""
    if values[0].dim() == 0:
        return [value.clone() for value in values]
    size = values[0].size(dim)
    if not isinstance(size, int):
        return NotImplemented
    distance = 1
    while distance < size:
        before = [value.narrow(dim, 0, size - distance) for value in values]
        now = [value.narrow(dim, distance, size - distance) for value in values]
        joined = join(before, now)
        values = [
            torch.cat([value.narrow(dim, 0, distance), part], dim)
            for value, part in zip(values, joined, strict=True)
        ]
        distance *= 2
    return [value.clone() for value in values] if size < 2 else values


RUNNING: dict[OpOverload, Callable[..., Any]] = {
    _ATEN.cumprod.default: running_product,
    _ATEN.cummax.default: running_maximum,
    _ATEN.cummin.default: running_minimum,
}
