"""Strides and dim orders."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def strides_of(sizes: Sequence[int], dim_order: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a dense tensor.

    Args:
        dim_order: Dimensions from outermost to innermost in memory.
    """
    strides = [1] * len(sizes)
    stride = 1
    for dim in reversed(dim_order):
        strides[dim] = stride
        stride *= max(sizes[dim], 1)
    return tuple(strides)


def is_contiguous_order(dim_order: Sequence[int]) -> bool:
    """Return whether ``dim_order`` is contiguous."""
    return all(dim == position for position, dim in enumerate(dim_order))


def has_layout(tensor: Tensor, dim_order: Sequence[int]) -> bool:
    """Return whether ``tensor`` is dense in ``dim_order``.

    Strides of dimensions of size 1 are arbitrary and ignored.
    """
    if tensor.numel() == 0:
        return True
    stride = 1
    for dim in reversed(dim_order):
        size = int(tensor.shape[dim])
        if size != 1 and tensor.stride(dim) != stride:
            return False
        stride *= int(size)
    return True


def dim_order_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the dim order of ``tensor``: dimensions by descending stride, ties by position."""
    strides = tensor.stride()
    return tuple(sorted(range(len(strides)), key=lambda dim: (-strides[dim], dim)))
