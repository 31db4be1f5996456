"""Checks for the operators of torch that read beyond their inputs when the arguments disagree.

Each was found by running damaged programs; torch's own checks stand in the composite operators
that call these, where a program does not pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch

from lowerdeck.runner.errors import ExecutionError


def _one_per_channel(values: Sequence[Any]) -> None:
    images, *others = values
    if images.dim() < 2:
        raise ExecutionError(f"a batch norm needs channels; its input is {list(images.shape)}")
    for position, other in enumerate(others[:4], 1):
        if isinstance(other, torch.Tensor) and other.shape != (images.shape[1],):
            raise ExecutionError(
                f"argument {position} has shape {list(other.shape)}; one element for each of "
                f"{images.shape[1]} channels was expected"
            )


_GUARDS: dict[str, Callable[[Sequence[Any]], None]] = {
    "aten::_native_batch_norm_legit_no_training.out": _one_per_channel,
    "aten::_native_batch_norm_legit.out": _one_per_channel,
    "aten::_native_batch_norm_legit.no_stats_out": lambda values: _one_per_channel(values[:3]),
    "aten::native_batch_norm.out": _one_per_channel,
}


def guarded(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``call`` with the check of the operator ``name`` before it, if it has one.

    Args:
        name: Full name of the operator.
        call: The operator.
    """
    check = _GUARDS.get(name)
    if check is None:
        return call

    @wraps(call)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check(args)
        return call(*args, **kwargs)

    return checked
