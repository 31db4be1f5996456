"""Orders of dimensions in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lowerdeck.decompose.calls.facts import number_key


def dense_order(sizes: Sequence[Any], strides: Sequence[Any]) -> list[int] | None:
    """Return the dimensions of a tensor, outermost first, None where they leave gaps or overlap.

    Symbols are compared by their expressions, which adds no guard.

    Args:
        sizes: The tensor's sizes.
        strides: Its strides.
    """
    left = [dim for dim in range(len(sizes)) if number_key(sizes[dim]) != 1]
    order: list[int] = []
    expected: Any = 1
    while left:
        key = number_key(expected)
        inner = next((dim for dim in reversed(left) if number_key(strides[dim]) == key), None)
        if inner is None:
            return None
        left.remove(inner)
        order.insert(0, inner)
        expected = expected * sizes[inner]
    # Where a dimension of one element lies nobody can tell.
    return [*(dim for dim in range(len(sizes)) if dim not in order), *order]


def inverse(order: Sequence[int]) -> list[int]:
    """Return the permutation that undoes one.

    Args:
        order: The permutation.
    """
    return [order.index(dim) for dim in range(len(order))]
