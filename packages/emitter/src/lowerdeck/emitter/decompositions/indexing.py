"""Decompositions of operators that read, write, find or count by index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lowerdeck.torch_base import OpOverload

_ATEN = torch.ops.aten


def put(
    self: torch.Tensor, index: torch.Tensor, source: torch.Tensor, accumulate: bool = False
) -> torch.Tensor:
    """Return ``put``: ``self`` with elements of the flattened tensor written.

    Args:
        index: Indices into the flattened tensor.
        accumulate: Whether to add to the old elements.
    """
    indices = _from_zero(index.reshape(-1), self.numel())
    flat = self.reshape(-1).index_put((indices,), source.reshape(-1), accumulate)
    return flat.reshape(self.shape)


def take(self: torch.Tensor, index: torch.Tensor) -> Any:
    """Return ``take``: elements of the flattened tensor.

    Args:
        index: Indices into the flattened tensor.
    """
    if self.numel() == 0:
        return self.new_empty(index.shape)
    indices = _from_zero(index.reshape(-1), self.numel())
    return torch.index_select(self.reshape(-1), 0, indices).reshape(index.shape)


def _from_zero(indices: torch.Tensor, size: int) -> torch.Tensor:
    """Return indices with negative ones counted from the start."""
    return torch.where(indices < 0, indices + size, indices)


def diagonal_scatter(
    self: torch.Tensor, src: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> torch.Tensor:
    """Return ``diagonal_scatter``: ``self`` with a diagonal replaced.

    Args:
        src: The diagonal, along the last dimension.
        offset: Index of the diagonal, above the main one when positive.
        dim1: The dimension of the rows.
        dim2: The dimension of the columns.
    """
    whole = self.movedim((dim1, dim2), (-2, -1))
    rows, columns = whole.shape[-2:]
    above = max(-offset, 0)
    # One element of the diagonal for each row; rows without one read an element that is masked.
    padded = torch.constant_pad_nd(src, [above, rows - above - src.size(-1)], 0)
    on_it = torch.arange(rows).reshape(-1, 1) + offset == torch.arange(columns)
    scattered = torch.where(on_it, padded.unsqueeze(-1), whole)
    return scattered.movedim((-2, -1), (dim1, dim2))


def nonzero_static(self: torch.Tensor, *, size: int, fill_value: int = -1) -> torch.Tensor:
    """Return the indices of the first nonzero elements.

    Args:
        size: Number of indices to return.
        fill_value: Fills the rows after the last index.
    """
    count = self.numel()
    hit = (self != 0).reshape(-1)
    rank = hit.to(torch.int64).cumsum(0) - 1
    # Elements that are zero are written after the end, which is cut off.
    slot = torch.where(hit & (rank < size), rank, size)
    positions = torch.full((size + 1,), count, dtype=torch.int64)
    positions = torch.scatter(positions, 0, slot, torch.arange(count))[:size]
    columns, inner = [], 1
    for length in reversed(self.shape):
        along = torch.div(positions, inner, rounding_mode="floor") % max(length, 1)
        columns.append(torch.where(positions < count, along, fill_value))
        inner *= max(length, 1)
    if not columns:
        return torch.zeros((size, 0), dtype=torch.int64)
    return torch.stack(columns[::-1], 1)


def histogram(
    self: torch.Tensor,
    bins: int = 100,
    min: float = 0,  # noqa: A002 - the name in the schema
    max: float = 0,  # noqa: A002 - the name in the schema
) -> Any:
    """Return ``histc``: the number of elements in each of several equal bins.

    Args:
        min: Start of the first bin.
        max: End of the last bin, which includes it.
    """
    if min >= max:
        # The range is that of the elements.
        return NotImplemented
    kind = self.dtype if self.is_floating_point() else torch.float32
    edges = torch.linspace(min, max, bins + 1, dtype=kind)
    values = self.reshape(-1, 1).to(kind)
    above, below = values >= edges[:-1], values < edges[1:]
    last = (values == edges[-1]) & (torch.arange(bins) == bins - 1)
    return ((above & below) | last).to(self.dtype).sum(0).to(self.dtype)


INDEXING: dict[OpOverload, Callable[..., Any]] = {
    _ATEN.put.default: put,
    _ATEN.take.default: take,
    _ATEN.diagonal_scatter.default: diagonal_scatter,
    _ATEN.nonzero_static.default: nonzero_static,
    _ATEN.histc.default: histogram,
}
