"""Decompose sorting and searching into ``topk``, the only kernel that orders elements."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from lowerdeck.torch_base import OpOverload, size_range

_ATEN = torch.ops.aten
_MOST_PAIRS = 2**26
"""The table that compares all pairs is in planned memory, with one byte or more per pair."""


def sort(
    self: torch.Tensor, dim: int = -1, descending: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``sort`` as the top k of all elements.

    Args:
        dim: The dimension to sort along.
    """
    if self.dim() == 0:
        return self.clone(), torch.zeros((), dtype=torch.int64)
    if self.dtype == torch.bool:
        # The kernel does not order bools.
        values, indices = torch.topk(self.to(torch.uint8), self.size(dim), dim, descending, True)
        return values.to(torch.bool), indices
    return torch.topk(self, self.size(dim), dim, descending, True)


def sort_stable(
    self: torch.Tensor, *, stable: bool | None, dim: int = -1, descending: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``sort.stable``.

    Args:
        stable: Whether equal elements keep their order.
        dim: The dimension to sort along.
        descending: Whether the largest come first.
    """
    values, indices = sort(self, dim, descending)
    if not stable or self.dim() == 0:
        return values, indices
    # Number the runs of equal elements, then sort by run and index, which are distinct.
    size = self.size(dim)
    before, now = values.narrow(dim, 0, size - 1), values.narrow(dim, 1, size - 1)
    differs = before != now
    if self.is_floating_point():
        differs = differs & ~(torch.isnan(before) & torch.isnan(now))
    first = torch.zeros_like(values.narrow(dim, 0, 1), dtype=torch.int64)
    run = torch.cat([first, differs.to(torch.int64)], dim).cumsum(dim)
    ordered = torch.topk(run * size + indices, size, dim, False, True)[0]
    indices = torch.remainder(ordered, size)
    return torch.gather(self, dim, indices), indices


def kth_value(
    self: torch.Tensor, k: int, dim: int = -1, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``kthvalue``.

    Args:
        k: Rank of the element, from 1.
        dim: The dimension to search.
        keepdim: Whether the dimension stays, with size 1.
    """
    if self.dim() == 0:
        return self.clone(), torch.zeros((), dtype=torch.int64)
    values, indices = torch.topk(self, k, dim, False, True)
    values, indices = values.narrow(dim, k - 1, 1), indices.narrow(dim, k - 1, 1)
    return (values, indices) if keepdim else (values.squeeze(dim), indices.squeeze(dim))


def median(self: torch.Tensor) -> torch.Tensor:
    """Return ``median`` of all elements, the lower one of two."""
    return median_along(self.reshape(-1), 0)[0]


def median_along(
    self: torch.Tensor, dim: int, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``median`` along a dimension, with its index.

    Args:
        dim: The dimension to search.
        keepdim: Whether the dimension stays, with size 1.
    """
    size = self.size(dim) if self.dim() else 1
    values, indices = kth_value(self, (size + 1) // 2, dim, keepdim)
    if not self.is_floating_point() or self.dim() == 0:
        return values, indices
    # If there is a NaN, the median is NaN, with the index of the first NaN.
    wrong = torch.isnan(self)
    has_nan = wrong.any(dim, keepdim)
    first = wrong.to(torch.int64).argmax(dim, keepdim)
    return torch.where(has_nan, math.nan, values), torch.where(has_nan, first, indices)


def searchsorted(
    sorted_sequence: torch.Tensor,
    self: torch.Tensor,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: torch.Tensor | None = None,
) -> Any:
    """Return ``searchsorted``: the number of sorted elements before each element.

    Args:
        sorted_sequence: The sorted elements, along the last dimension.
        self: The elements to find a position for.
        out_int32: Whether the result is int32.
        right: Whether equal elements precede the position.
        side: ``"left"`` or ``"right"``; an alternative to ``right``.
        sorter: Indices that sort ``sorted_sequence``, if it is unsorted.
    """
    pairs = size_range(sorted_sequence.size(-1) * self.numel())[1]
    if pairs is None or pairs > _MOST_PAIRS:
        return NotImplemented
    if sorter is not None:
        sorted_sequence = torch.gather(sorted_sequence, -1, sorter)
    row = sorted_sequence if sorted_sequence.dim() == 1 else sorted_sequence.unsqueeze(-2)
    values = self.unsqueeze(-1)
    # Compared so that NaN sorts last.
    is_after = row > values if right or side == "right" else row >= values
    indices = torch.logical_not(is_after).to(torch.int64).sum(-1)
    return indices.to(torch.int32) if out_int32 else indices


def searchsorted_number(sorted_sequence: torch.Tensor, self: float, **options: Any) -> Any:
    """Return ``searchsorted`` of one number."""
    return searchsorted(sorted_sequence, torch.full((), self), **options)


def bucketize(self: torch.Tensor, boundaries: torch.Tensor, **options: Any) -> Any:
    """Return ``bucketize``.

    Args:
        boundaries: The sorted boundaries between the buckets.
    """
    return searchsorted(boundaries, self, **options)


ORDERING: dict[OpOverload, Callable[..., Any]] = {
    _ATEN.sort.default: sort,
    _ATEN.sort.stable: sort_stable,
    _ATEN.kthvalue.default: kth_value,
    _ATEN.median.default: median,
    _ATEN.median.dim: median_along,
    _ATEN.searchsorted.Tensor: searchsorted,
    _ATEN.searchsorted.Scalar: searchsorted_number,
    _ATEN.bucketize.Tensor: bucketize,
}
