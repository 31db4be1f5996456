"""Keep the memory layout of torch's results in decompositions.

A program has no strides, but the model was traced with torch's: a ``view`` that is legal for
torch's strides may fail for others.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch

from lowerdeck.emitter._torch_private import current_result, is_known, untraced


@cache
def keeping_layouts(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``rule`` with results in the memory layout of the traced node's results.

    Args:
        rule: A decomposition. If another decomposition calls it, the traced node is that of the
            caller; only results of the same shape get its layout, and values do not change.
    """

    @wraps(rule)
    def laid_out(*args: Any, **kwargs: Any) -> Any:
        result = rule(*args, **kwargs)
        traced: Any = current_result() if result is not NotImplemented else None
        if not isinstance(result, (list, tuple)):
            return _like(result, traced)
        if not isinstance(traced, (list, tuple)) or len(result) != len(traced):
            return result
        return [_like(part, traced_part) for part, traced_part in zip(result, traced, strict=True)]

    return laid_out


def _like(result: Any, traced: Any) -> Any:
    if not isinstance(result, torch.Tensor) or not isinstance(traced, torch.Tensor):
        return result
    if result.is_complex() and not all(isinstance(size, int) for size in result.shape):
        # Any permute would be decomposed into pairs again.
        return result
    with untraced():
        order = _outermost_first(traced)
        if result.dim() != traced.dim() or order == _outermost_first(result):
            return result
        if not all(is_known(a == b) for a, b in zip(result.shape, traced.shape, strict=True)):
            return result
    back = [order.index(dim) for dim in range(len(order))]
    return result.permute(order).contiguous().permute(back)


def _outermost_first(tensor: torch.Tensor) -> list[int]:
    """Return the dimensions by descending stride; those of equal stride keep their order."""
    order: list[int] = []
    for dim, stride in enumerate(tensor.stride()):
        at = len(order)
        if not is_known(tensor.shape[dim] == 1):
            while at and is_known(tensor.stride(order[at - 1]) < stride):
                at -= 1
        order.insert(at, dim)
    return order
