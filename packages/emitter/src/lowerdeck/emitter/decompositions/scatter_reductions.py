"""Decompose scatter reductions and embedding bags."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lowerdeck.emitter._torch_private import current_result, is_known, untraced
from lowerdeck.torch_base import OpOverload

_ATEN = torch.ops.aten

# Modes of an embedding bag.
_AVERAGES, _MAXIMA = 1, 2
_BAG_RESULTS = 4


def scatter_reduce(
    self: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    src: torch.Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> Any:
    """Return ``scatter_reduce`` as sums, or as a scatter in sorted order.

    Args:
        dim: The dimension that ``index`` refers to.
        src: The elements; those beyond the shape of ``index`` are ignored.
        reduce: ``"sum"``, ``"prod"``, ``"mean"``, ``"amax"`` or ``"amin"``; ``"prod"`` is not
            decomposed here.
        include_self: Whether the elements of ``self`` are included.
    """
    if self.dim() == 0:
        self, index, src = self.reshape(1), index.reshape(-1), src.reshape(-1)
        reduced = scatter_reduce(self, 0, index, src, reduce, include_self=include_self)
        return reduced if reduced is NotImplemented else reduced.reshape(())
    dim %= self.dim()
    if src.shape != index.shape:
        for axis, size in enumerate(index.shape):
            src = src.narrow(axis, 0, size)
    if index.numel() == 0:
        return self.clone()
    if reduce in ("sum", "mean"):
        return _added(self, dim, index, src, reduce == "mean", include_self)
    if reduce == "prod" or self.dtype == torch.bool:
        return NotImplemented
    # Elements are scattered in sorted order, so that the one to keep is written last; NaN is last.
    negate = reduce == "amin" and src.is_floating_point()
    size, largest = src.size(dim), reduce == "amin" and not negate
    values, order = torch.topk(-src if negate else src, size, dim, largest, True)
    index = torch.gather(index, dim, order)
    reduced = torch.scatter(self, dim, index, -values if negate else values)
    if not include_self:
        return reduced
    return torch.maximum(self, reduced) if reduce == "amax" else torch.minimum(self, reduced)


def _added(
    self: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    src: torch.Tensor,
    mean: bool,
    include_self: bool,
) -> torch.Tensor:
    start = self if include_self else torch.scatter(self, dim, index, 0)
    total = torch.scatter_add(start, dim, index, src)
    if not mean:
        return total
    ones = torch.ones_like(src)
    count = torch.ones_like(self) if include_self else torch.zeros_like(self)
    count = torch.scatter_add(count, dim, index, ones).clamp(min=1)
    if self.is_floating_point():
        return total / count
    return torch.div(total, count, rounding_mode="floor")


def embedding_bag(
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    scale_grad_by_freq: bool = False,  # noqa: ARG001 - the schema's
    mode: int = 0,
    sparse: bool = False,  # noqa: ARG001 - the schema's
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> Any:
    """Return sums, means or maxima of table rows, one bag of rows each.

    The other results, which only gradients need, have the sizes recorded at export, but may have
    other values.

    Args:
        weight: The table, shape (rows, features).
        indices: The rows of all bags, one bag after another.
        offsets: Start of each bag.
        mode: 0 for sums, 1 for means, 2 for maxima.
        per_sample_weights: Factor of each row.
        include_last_offset: Whether the last offset is the end of the last bag.
        padding_idx: A row to ignore, negative for none.
    """
    count = offsets.size(0) - 1 if include_last_offset else offsets.size(0)
    all_offsets = offsets
    if include_last_offset:
        offsets = offsets[:count]
    length = indices.size(0)
    rows = _ATEN.embedding.default(weight, indices)
    # An element belongs to the last of the bags that start at or before it.
    started = offsets.reshape(1, -1) <= torch.arange(length).reshape(-1, 1)
    bag = started.to(torch.int64).sum(1) - 1
    # Ignored rows go to an additional bag, which is cut off.
    bags = count if padding_idx < 0 else count + 1
    if padding_idx >= 0:
        bag = torch.where(indices == padding_idx, count, bag)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.reshape(-1, 1)
    index = bag.reshape(-1, 1).expand(rows.shape)
    reduced = torch.zeros((bags, weight.size(1)), dtype=rows.dtype)
    reduce = {_AVERAGES: "mean", _MAXIMA: "amax"}.get(mode, "sum")
    reduced = scatter_reduce(reduced, 0, index, rows, reduce, include_self=False)
    if reduced is NotImplemented:
        return reduced
    sizes = torch.zeros_like(offsets)
    max_indices = torch.zeros_like(reduced, dtype=torch.int64) if mode == _MAXIMA else sizes
    recorded: Any = current_result()
    if isinstance(recorded, (list, tuple)) and len(recorded) == _BAG_RESULTS:
        with untraced():
            # Kernels omit this result if they can; one of the two operators includes the end.
            is_empty = is_known(recorded[1].shape[0] == 0)
            is_count = is_known(recorded[2].shape[0] == count)
        bag = bag[:0] if is_empty else bag
        sizes = sizes if is_count else torch.zeros_like(all_offsets)
    return reduced[:count], bag, sizes, max_indices[:count]


SCATTER_REDUCTIONS: dict[OpOverload, Callable[..., Any]] = {
    _ATEN.scatter_reduce.two: scatter_reduce,
    _ATEN._embedding_bag_forward_only.default: embedding_bag,
    _ATEN._embedding_bag.default: embedding_bag,
}
