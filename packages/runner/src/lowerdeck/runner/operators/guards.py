"""Guards of torch operators that access memory out of bounds if their arguments disagree.

Found by fuzzing every allowed kernel with tensors between protected pages. torch checks arguments
in composite operators, but a program calls kernels directly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch

from lowerdeck.runner.errors import ExecutionError


def _check_channels(values: Sequence[Any]) -> None:
    images, *others = values
    if images.dim() < 2:
        raise ExecutionError(
            f"a batch norm's input has shape {list(images.shape)}; expected (N, C, ...)"
        )
    for position, other in enumerate(others[:4], 1):
        if isinstance(other, torch.Tensor) and other.shape != (images.shape[1],):
            raise ExecutionError(
                f"batch norm argument {position} has shape {list(other.shape)}; expected one "
                f"element for each of {images.shape[1]} channels"
            )


def _check_rfft(values: Sequence[Any]) -> None:
    """Check an rfft, whose kernel does not check dimensions."""
    numbers, dims, normalization = values[0], values[1], values[2]
    if numbers.dtype not in (torch.float32, torch.float64):
        raise ExecutionError(
            f"the transform's input is {numbers.dtype}; expected float32 or float64"
        )
    _check_dims(numbers, dims, normalization)


def _check_irfft(values: Sequence[Any]) -> None:
    """Check an irfft."""
    numbers, dims, normalization, last = values[:4]
    if numbers.dtype not in (torch.complex64, torch.complex128):
        raise ExecutionError(
            f"the transform's input is {numbers.dtype}; expected complex64 or complex128"
        )
    _check_dims(numbers, dims, normalization)
    if not 1 <= last <= 2 * numbers.shape[dims[-1]] - 1:
        raise ExecutionError(
            f"found size {last} of the result; expected 1 to {2 * numbers.shape[dims[-1]] - 1}"
        )


def _check_dims(numbers: torch.Tensor, dims: Sequence[int], normalization: int) -> None:
    rank = numbers.dim()
    if not dims or len(set(dims)) != len(dims) or not all(0 <= dim < rank for dim in dims):
        raise ExecutionError(
            f"found dims {list(dims)}; expected one or more distinct dims from 0 to {rank - 1}"
        )
    if not 0 <= normalization <= 2:
        raise ExecutionError(f"the normalization is {normalization}; expected 0, 1 or 2")
    if numbers.numel() == 0:
        raise ExecutionError(f"the transform's input of shape {list(numbers.shape)} is empty")


def _check_pdist(values: Sequence[Any]) -> None:
    rows = values[0]
    if rows.dim() != 2 or rows.dtype not in (torch.float32, torch.float64):
        raise ExecutionError(
            f"pdist of a {rows.dtype} tensor of shape {list(rows.shape)}; expected a float32 or "
            "float64 matrix"
        )
    if not values[1] >= 0:
        raise ExecutionError(f"pdist with p={values[1]}; expected p >= 0")


def _check_pool_indices(values: Sequence[Any]) -> None:
    """Check the indices to which the gradient of a max pool is written."""
    images, positions = values[1], values[7]
    count = images.shape[-2:].numel() if images.dim() >= 2 else 0
    if ((positions < 0) | (positions >= count)).any():
        raise ExecutionError(f"found max-pool indices outside of images of {count} elements")


_GUARDS: dict[str, Callable[[Sequence[Any]], None]] = {
    "aten::_fft_c2r.out": _check_irfft,
    "aten::_fft_r2c.out": _check_rfft,
    "aten::_pdist_forward.out": _check_pdist,
    "aten::max_pool2d_with_indices_backward.grad_input": _check_pool_indices,
    "aten::_native_batch_norm_legit_no_training.out": _check_channels,
    "aten::_native_batch_norm_legit.out": _check_channels,
    "aten::_native_batch_norm_legit.no_stats_out": lambda values: _check_channels(values[:3]),
    "aten::native_batch_norm.out": _check_channels,
}


def guarded(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``call``, preceded by the guard of ``name`` if there is one.

    Args:
        name: Full name of the operator, with overload.
    """
    check = _GUARDS.get(name)
    if check is None:
        return call

    @wraps(call)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check(args)
        return call(*args, **kwargs)

    return checked
