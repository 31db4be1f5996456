"""Operators that ask how a tensor lies in memory, and tensors that lie otherwise than recorded.

A decomposition may give its result in other strides than the operator that it stands for:
attention with a mask does. The rest of the program was traced with the operator's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lowerdeck.decompose.facts import SYMBOLS

_ATEN = torch.ops.aten
BY_STRIDES = frozenset({_ATEN.as_strided.default, _ATEN.as_strided_copy.default})
"""Operators whose result depends on the strides of what they are given."""


def dense_order(tensor: torch.Tensor) -> list[int] | None:
    """Return the dimensions of a tensor by falling stride, None if that does not tell all.

    Args:
        tensor: A fake tensor. What lies with gaps or overlaps, or in symbolic strides, has no
            order.
    """
    sizes, strides = tuple(tensor.shape), tuple(tensor.stride())
    if any(isinstance(number, SYMBOLS) for number in (*sizes, *strides)):
        return None
    order = sorted(range(len(sizes)), key=lambda dim: (-strides[dim], sizes[dim] != 1))
    expected = 1
    for dim in reversed(order):
        if sizes[dim] != 1 and strides[dim] != expected:
            return None
        expected *= sizes[dim]
    return order


def inverse(order: Sequence[int]) -> list[int]:
    """Return the permutation that undoes one."""
    return [order.index(dim) for dim in range(len(order))]
