"""Decompose sorting into ``topk``, the only ordering kernel, and searching into comparisons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lowerdeck.torch_base import OpOverload, size_range

_ATEN = torch.ops.aten
_MOST_PAIRS = 2**26
"""Largest table of compared pairs: it is in planned memory, with one byte or more per pair."""


def sort(
    self: torch.Tensor, dim: int = -1, descending: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``sort`` as the top k of all elements."""
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
    """Return ``sort.stable``: after a sort, equal elements are sorted by their index."""
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


def bucketize(self: torch.Tensor, boundaries: torch.Tensor, **options: Any) -> Any:
    """Return ``bucketize`` as ``searchsorted``.

    Args:
        boundaries: The sorted boundaries between the buckets.
    """
    return searchsorted(boundaries, self, **options)


ORDERING: dict[OpOverload, Callable[..., Any]] = {
    _ATEN.sort.default: sort,
    _ATEN.sort.stable: sort_stable,
    _ATEN.searchsorted.Tensor: searchsorted,
    _ATEN.bucketize.Tensor: bucketize,
}
