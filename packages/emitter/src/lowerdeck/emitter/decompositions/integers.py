"""Exact integer arithmetic for operators whose kernels compute in float64.

Above 2^53 float64 does not represent every integer, and results out of range become the smallest
integer instead of wrapping around. In runtime 1.4.1 products, sums of two tensors, floor division
and sums over several dimensions use integer arithmetic. Powers, ``fmod``, truncating division,
rounding and the sum over one dimension do not; that sum also accumulates float64 in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from lowerdeck.torch_base import OpOverload, is_getitem

_ATEN = torch.ops.aten
# Half of the integers that float64 represents exactly, so that start plus length is exact too.
_EXACT = 2**52
_RANKINGS = (_ATEN.sort.default, _ATEN.sort.stable, _ATEN.topk.default)
_ROUNDED = (_ATEN.floor.default, _ATEN.ceil.default, _ATEN.trunc.default)


def power(self: torch.Tensor, exponent: float) -> Any:
    """Return ``pow`` of integers with a constant exponent, by repeated squaring.

    Args:
        exponent: Non-negative; torch rejects others.
    """
    if not _is_integer(self) or type(exponent) is not int or exponent < 0:
        return NotImplemented
    base = self.to(torch.result_type(self, exponent))
    result, left = None, exponent
    while left:
        if left & 1:
            result = base if result is None else result * base
        left >>= 1
        if left:
            base = base * base
    if result is None:
        return torch.ones_like(base)
    return result.clone() if exponent == 1 else result


def truncated_remainder(self: torch.Tensor, other: Any) -> Any:
    """Return ``fmod`` of integers.

    Args:
        other: The divisor, a tensor or a number.
    """
    dtype = _wide_type(self, other)
    if dtype is None:
        number = _in_range(self, other)
        return NotImplemented if number is other else torch.fmod(self, number)
    _, remainder, goes_on = _floored(self, other, dtype)
    return torch.where(goes_on, remainder - other, remainder)


def divided(self: torch.Tensor, other: Any, *, rounding_mode: str | None) -> Any:
    """Return the truncated quotient of integers.

    Args:
        other: The divisor, a tensor or a number.
        rounding_mode: Only ``"trunc"`` is decomposed: the kernel computes the others in integers.
    """
    number = _in_range(self, other) if rounding_mode is not None else other
    if number is not other:
        return torch.div(self, number, rounding_mode=rounding_mode)
    dtype = _wide_type(self, other) if rounding_mode == "trunc" else None
    if dtype is None:
        return NotImplemented
    quotient, _, goes_on = _floored(self, other, dtype)
    return quotient + goes_on.to(dtype)


def divides_indices(node: fx.Node) -> bool:
    """Return whether a division is of indices of sorted elements, where float64 is exact."""
    dividend: Any = node.args[0]
    return is_getitem(dividend) and dividend.args[0].target in _RANKINGS and bool(dividend.args[1])


def floor_divided(self: torch.Tensor, other: Any) -> Any:
    """Return the floored quotient by a number, wrapped to the dtype of the tensor."""
    number = _in_range(self, other)
    return NotImplemented if number is other else torch.floor_divide(self, number)


def rounded(self: torch.Tensor) -> Any:
    """Return ``floor``, ``ceil`` or ``trunc`` of integers: a copy."""
    return self.clone() if _is_integer(self) else NotImplemented


def total(
    self: torch.Tensor,
    dim: Sequence[int] | None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """Return a sum over one dimension as a sum over two, which the kernel computes in its dtype.

    Args:
        keepdim: Whether reduced dimensions stay, with size 1.
        dtype: Dtype of the sum.
    """
    result_type = dtype
    if result_type is None:
        result_type = self.dtype if self.is_floating_point() else torch.int64
    if not dim or len(dim) != 1 or self.dim() == 0 or not _is_narrowed(self.dtype, result_type):
        return NotImplemented
    dims = [dim[0] % self.dim(), self.dim()]
    result = torch.sum(self.unsqueeze(-1), dims, keepdim, dtype=dtype)
    return result.squeeze(-1) if keepdim else result


def numbers_from(
    start: Any, end: Any, step: Any = 1, *, dtype: torch.dtype | None = None, **_options: Any
) -> Any:
    """Return ``arange`` from a large start as ``arange`` from zero plus the start.

    Args:
        end: The end, exclusive.
    """
    if type(start) is not int or abs(start) <= _EXACT or dtype not in (None, torch.int64):
        return NotImplemented
    if isinstance(end, float) or isinstance(step, float):
        return NotImplemented
    return torch.arange(0, end - start, step, dtype=dtype) + start


def evenly_spaced(
    start: Any, end: Any, steps: int, *, dtype: torch.dtype | None = None, **options: Any
) -> Any:
    """Return ``linspace`` of integers with truncated ends, as in eager.

    Args:
        start: The first element, a number or a tensor of one.
        **options: Other arguments of ``linspace``.
    """
    if dtype is None or dtype.is_floating_point or dtype.is_complex:
        return NotImplemented
    first, last = _cut(start, dtype), _cut(end, dtype)
    if first is start and last is end:
        return NotImplemented
    return torch.linspace(first, last, steps, dtype=dtype, **options)


def _cut(number: Any, dtype: torch.dtype) -> Any:
    if isinstance(number, torch.Tensor):
        return number.to(dtype) if number.is_floating_point() else number
    return int(number) if isinstance(number, float) else number


def remainder_of_number(self: float, other: torch.Tensor) -> torch.Tensor:
    """Return ``remainder`` of a number and a tensor."""
    return torch.remainder(torch.full((), self, dtype=torch.result_type(self, other)), other)


def product(self: torch.Tensor, mat2: torch.Tensor) -> torch.Tensor:
    """Return ``_int_mm``: the product of 8-bit matrices, accumulated in 32 bits.

    Args:
        self: The rows, signed or not.
    """
    return torch.mm(self.to(torch.int32), mat2.to(torch.int32))


def _floored(
    self: torch.Tensor, other: Any, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return floored quotient, remainder, and where the truncated quotient is larger by one."""
    wide = self.to(dtype)
    quotient = torch.div(wide, other, rounding_mode="floor")
    remainder = wide - quotient * other
    # The remainder is zero or has the sign of ``other``.
    return quotient, remainder, (remainder != 0) & ((remainder < 0) != (wide < 0))


def _is_integer(tensor: torch.Tensor) -> bool:
    return (
        not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool
    )


def _wide_type(self: torch.Tensor, other: Any) -> torch.dtype | None:
    """Return int64 if the result has that dtype, else None: float64 is exact for others."""
    if isinstance(other, float | complex):
        return None
    return torch.int64 if torch.result_type(self, other) == torch.int64 else None


def _in_range(self: torch.Tensor, other: Any) -> Any:
    """Return a number wrapped around to an integer tensor's dtype, as torch does."""
    if type(other) is not int or not _is_integer(self):
        return other
    limits = torch.iinfo(self.dtype)
    if limits.min <= other <= limits.max:
        return other
    return (other - limits.min) % (1 << limits.bits) + limits.min


def _is_narrowed(source: torch.dtype, result: torch.dtype) -> bool:
    """Return whether a sum may exceed 2^53 or the range of its dtype, or is of float64."""
    if source == result == torch.float64:
        return True
    if result.is_floating_point or result.is_complex or result == torch.bool:
        return False
    if source.is_floating_point or source.is_complex:
        return False
    return result != torch.int64 or source in (torch.int32, torch.int64)


# Kept where ``divides_indices`` holds.
DIVISIONS = frozenset({_ATEN.div.Tensor_mode, _ATEN.div.Scalar_mode})
INTEGERS: dict[OpOverload, Callable[..., Any]] = {
    _ATEN.pow.Tensor_Scalar: power,
    _ATEN.fmod.Tensor: truncated_remainder,
    _ATEN.fmod.Scalar: truncated_remainder,
    **dict.fromkeys(DIVISIONS, divided),
    _ATEN.floor_divide.default: floor_divided,
    _ATEN.arange.start: numbers_from,
    **dict.fromkeys(
        [
            *(_ATEN.linspace.default, _ATEN.linspace.Tensor_Tensor),
            *(_ATEN.linspace.Tensor_Scalar, _ATEN.linspace.Scalar_Tensor),
        ],
        evenly_spaced,
    ),
    _ATEN.arange.start_step: numbers_from,
    _ATEN.sum.dim_IntList: total,
    _ATEN.remainder.Scalar_Tensor: remainder_of_number,
    _ATEN._int_mm.default: product,
    **dict.fromkeys(_ROUNDED, rounded),
}
