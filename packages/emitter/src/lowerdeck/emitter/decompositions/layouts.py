"""Results of rules in the layout that torch's operator gives them.

A program has no strides, but the rest of the model was traced with torch's: a ``view`` that they
allow fails on others.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from lowerdeck.emitter._torch_private import current_result, is_known, untraced


def keeping_layouts(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``rule`` with results that lie in memory as those of the traced node did.

    Args:
        rule: A decomposition. Where it is used inside another one, the traced node is the outer
            one; its layout is then given to results of the same shape, which changes no number.
    """

    @wraps(rule)
    def laid_out(*args: Any, **kwargs: Any) -> Any:
        found = rule(*args, **kwargs)
        wanted: Any = current_result() if found is not NotImplemented else None
        if not isinstance(found, (list, tuple)):
            return _like(found, wanted)
        if not isinstance(wanted, (list, tuple)) or len(found) != len(wanted):
            return found
        return [_like(one, other) for one, other in zip(found, wanted, strict=True)]

    return laid_out


def _like(found: Any, wanted: Any) -> Any:
    if not isinstance(found, torch.Tensor) or not isinstance(wanted, torch.Tensor):
        return found
    if found.is_complex() and not all(isinstance(size, int) for size in found.shape):
        # It is made of pairs anew by whatever moves it, permuting included.
        return found
    with untraced():
        order = _outermost_first(wanted)
        if found.dim() != wanted.dim() or order == _outermost_first(found):
            return found
        if not all(is_known(a == b) for a, b in zip(found.shape, wanted.shape, strict=True)):
            return found
    back = [order.index(dim) for dim in range(len(order))]
    return found.permute(order).contiguous().permute(back)


def _outermost_first(tensor: torch.Tensor) -> list[int]:
    """Return the dimensions by falling stride; those that may be equal stay as they are."""
    order: list[int] = []
    for dim, stride in enumerate(tensor.stride()):
        at = len(order)
        if not is_known(tensor.shape[dim] == 1):
            while at and is_known(tensor.stride(order[at - 1]) < stride):
                at -= 1
        order.insert(at, dim)
    return order
