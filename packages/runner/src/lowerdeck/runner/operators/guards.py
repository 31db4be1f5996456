"""Checks for torch operators that read out of bounds if their arguments disagree.

Each was found by calling every kernel that a file may name with arguments that no compiler
writes, with tensors between protected pages. torch's own checks are in the composite operators
that call these, and a program calls them directly.
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


def _transform(values: Sequence[Any]) -> None:
    """Check a Fourier transform of real numbers: its kernel does not check dimensions."""
    numbers, dims, normalization = values[0], values[1], values[2]
    if numbers.dtype not in (torch.float32, torch.float64):
        raise ExecutionError(f"a transform of {numbers.dtype}; float32 or float64 was expected")
    _check_dims(numbers, dims, normalization)


def _back_transform(values: Sequence[Any]) -> None:
    """Check a Fourier transform to real numbers."""
    numbers, dims, normalization, last = values[:4]
    if numbers.dtype not in (torch.complex64, torch.complex128):
        raise ExecutionError(f"a transform of {numbers.dtype}; complex numbers were expected")
    _check_dims(numbers, dims, normalization)
    if not 1 <= last <= 2 * numbers.shape[dims[-1]] - 1:
        raise ExecutionError(
            f"{last} real numbers cannot come from {numbers.shape[dims[-1]]} complex ones"
        )


def _check_dims(numbers: torch.Tensor, dims: Sequence[int], normalization: int) -> None:
    rank = numbers.dim()
    if not dims or len(set(dims)) != len(dims) or not all(0 <= dim < rank for dim in dims):
        raise ExecutionError(f"a transform over the dimensions {list(dims)} of {rank}")
    if not 0 <= normalization <= 2:
        raise ExecutionError(f"the normalization {normalization}; 0, 1 or 2 was expected")
    if numbers.numel() == 0:
        raise ExecutionError(f"a transform of no numbers: {list(numbers.shape)}")


def _distances(values: Sequence[Any]) -> None:
    rows = values[0]
    if rows.dim() != 2 or rows.dtype not in (torch.float32, torch.float64):
        raise ExecutionError(
            f"distances of a {rows.dtype} of shape {list(rows.shape)}; a matrix of float32 or "
            "float64 was expected"
        )
    if not values[1] >= 0:
        raise ExecutionError(f"distances of the norm {values[1]}; 0 or more was expected")


def _pooled_positions(values: Sequence[Any]) -> None:
    """Check the positions of maxima at which the gradient of a pool is written."""
    images, positions = values[1], values[7]
    count = images.shape[-2:].numel() if images.dim() >= 2 else 0
    if ((positions < 0) | (positions >= count)).any():
        raise ExecutionError(f"found positions of maxima outside of images of {count} elements")


_GUARDS: dict[str, Callable[[Sequence[Any]], None]] = {
    "aten::_fft_c2r.out": _back_transform,
    "aten::_fft_r2c.out": _transform,
    "aten::_pdist_forward.out": _distances,
    "aten::max_pool2d_with_indices_backward.grad_input": _pooled_positions,
    "aten::_native_batch_norm_legit_no_training.out": _one_per_channel,
    "aten::_native_batch_norm_legit.out": _one_per_channel,
    "aten::_native_batch_norm_legit.no_stats_out": lambda values: _one_per_channel(values[:3]),
    "aten::native_batch_norm.out": _one_per_channel,
}


def guarded(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``call`` with the check of the operator ``name`` before it, if there is one.

    Args:
        name: Full name of the operator.
    """
    check = _GUARDS.get(name)
    if check is None:
        return call

    @wraps(call)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check(args)
        return call(*args, **kwargs)

    return checked
