"""How a tensor lies in its memory: in which order, and whether it fills it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from lowerdeck.decompose.calls.facts import TensorFacts, number_key

_ATEN = torch.ops.aten


# Results of these are laid out by their kernels otherwise than fake tensors have them.
NORMS = frozenset(
    {
        _ATEN.batch_norm.default,
        _ATEN._native_batch_norm_legit_functional.default,
        _ATEN._native_batch_norm_legit_no_training.default,
    }
)
_CHANNELS_LAST = {4: [0, 2, 3, 1], 5: [0, 2, 3, 4, 1]}


def norm_as_run(facts: TensorFacts) -> TensorFacts:
    """Return the facts of a batch norm's result as the CPU's kernel lays it out.

    It keeps channels last, and makes anything else contiguous. Fake tensors keep any order of
    dimensions, so that torch decomposes what follows into views which fail when the program runs:
    the Conformers of transformers have such a norm of a transposed tensor.

    Args:
        facts: Those of the fake result.
    """
    order = dense_order(facts.shape, facts.stride)
    if facts.device.type != "cpu" or order is None:
        return facts
    long = [dim for dim in order if number_key(facts.shape[dim]) != 1]
    if long in (sorted(long), [d for d in _CHANNELS_LAST.get(len(facts.shape), ()) if d in long]):
        return facts
    sizes = [1 if number_key(size) == 0 else size for size in facts.shape]
    return replace(facts, stride=tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))))


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
