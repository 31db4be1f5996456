"""Arithmetic on integers that kernels do in float64, by way of kernels that do not.

Above 2^53 float64 knows not every integer, and what does not fit into an integer becomes the least
one, where torch wraps around. In the runtime 1.4.1 products, sums of two, floored division and
sums over several dimensions are computed in integers; powers, ``fmod``, division that truncates,
rounding and the sum over one dimension are not. That sum adds float64 up in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lowerdeck.torch_base import OpOverload

_ATEN = torch.ops.aten
# Half of what float64 counts to without leaving one out, so that an end after it is exact as well.
_EXACT = 2**52
_ROUNDED = (_ATEN.floor.default, _ATEN.ceil.default, _ATEN.trunc.default)


def power(self: torch.Tensor, exponent: float) -> Any:
    """Return the power of integers to a fixed one by squares and products.

    Args:
        exponent: The exponent; a negative one is refused by torch.
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
    """Return the remainder of integers with the sign of what is divided.

    Args:
        other: What by: integers, or one.
    """
    dtype = _wide_type(self, other)
    if dtype is None:
        number = _in_range(self, other)
        return NotImplemented if number is other else torch.fmod(self, number)
    _, remainder, goes_on = _floored(self, other, dtype)
    return torch.where(goes_on, remainder - other, remainder)


def divided(self: torch.Tensor, other: Any, *, rounding_mode: str | None) -> Any:
    """Return the quotient of integers without what follows the point.

    Args:
        other: What by: integers, or one.
        rounding_mode: Only ``"trunc"`` is not computed in integers.
    """
    number = _in_range(self, other) if rounding_mode is not None else other
    if number is not other:
        return torch.div(self, number, rounding_mode=rounding_mode)
    dtype = _wide_type(self, other) if rounding_mode == "trunc" else None
    if dtype is None:
        return NotImplemented
    quotient, _, goes_on = _floored(self, other, dtype)
    return quotient + goes_on.to(dtype)


def floor_divided(self: torch.Tensor, other: Any) -> Any:
    """Return the floored quotient by a number that the type of the tensor holds."""
    number = _in_range(self, other)
    return NotImplemented if number is other else torch.floor_divide(self, number)


def rounded(self: torch.Tensor) -> Any:
    """Return integers as they are."""
    return self.clone() if _is_integer(self) else NotImplemented


def total(
    self: torch.Tensor,
    dim: Sequence[int] | None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """Return the sum over one dimension as that over two, for which the kernel keeps the type.

    Args:
        self: What to add up.
        keepdim: Whether they stay, as 1.
        dtype: The type of the sum.
    """
    result_type = dtype
    if result_type is None:
        result_type = self.dtype if self.is_floating_point() else torch.int64
    if not dim or len(dim) != 1 or self.dim() == 0 or not _is_narrowed(self.dtype, result_type):
        return NotImplemented
    both = [dim[0] % self.dim(), self.dim()]
    result = torch.sum(self.unsqueeze(-1), both, keepdim, dtype=dtype)
    return result.squeeze(-1) if keepdim else result


def numbers_from(
    start: Any, end: Any, step: Any = 1, *, dtype: torch.dtype | None = None, **_options: Any
) -> Any:
    """Return integers one after the other, counted from zero where the first is far from it.

    Args:
        end: What is not reached.
        step: How far apart they are.
    """
    if type(start) is not int or abs(start) <= _EXACT or dtype not in (None, torch.int64):
        return NotImplemented
    if isinstance(end, float) or isinstance(step, float):
        return NotImplemented
    return torch.arange(0, end - start, step, dtype=dtype) + start


def evenly_spaced(
    start: Any, end: Any, steps: int, *, dtype: torch.dtype | None = None, **options: Any
) -> Any:
    """Return integers from one number to another, which eager cuts to integers first.

    Args:
        start: The first, a number or a tensor of one.
        **options: As torch passes them on.
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
    """Return the remainder of a number by each element.

    Args:
        other: What it is divided by.
    """
    return torch.remainder(torch.full((), self, dtype=torch.result_type(self, other)), other)


def product(self: torch.Tensor, mat2: torch.Tensor) -> torch.Tensor:
    """Return the product of matrices of 8-bit integers, whose sums are of 32 bits.

    Args:
        self: The rows, signed or not.
    """
    return torch.mm(self.to(torch.int32), mat2.to(torch.int32))


def _floored(
    self: torch.Tensor, other: Any, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return floored quotient and remainder, and where rounding to zero gives one more."""
    wide = self.to(dtype)
    quotient = torch.div(wide, other, rounding_mode="floor")
    remainder = wide - quotient * other
    # The remainder has the sign of ``other``, or is none.
    return quotient, remainder, (remainder != 0) & ((remainder < 0) != (wide < 0))


def _is_integer(tensor: torch.Tensor) -> bool:
    return (
        not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool
    )


def _wide_type(self: torch.Tensor, other: Any) -> torch.dtype | None:
    """Return int64 where that is what is computed in; float64 holds what is narrower."""
    if isinstance(other, float | complex):
        return None
    return torch.int64 if torch.result_type(self, other) == torch.int64 else None


def _in_range(self: torch.Tensor, other: Any) -> Any:
    """Return a number as torch converts it to the type of integers: it wraps around."""
    if type(other) is not int or not _is_integer(self):
        return other
    limits = torch.iinfo(self.dtype)
    if limits.min <= other <= limits.max:
        return other
    return (other - limits.min) % (1 << limits.bits) + limits.min


def _is_narrowed(source: torch.dtype, result: torch.dtype) -> bool:
    """Return whether a sum may be beyond 2^53 or its own type, or is of float64."""
    if source == result == torch.float64:
        return True
    if result.is_floating_point or result.is_complex or result == torch.bool:
        return False
    if source.is_floating_point or source.is_complex:
        return False
    return result != torch.int64 or source in (torch.int32, torch.int64)


INTEGERS: dict[OpOverload, Callable[..., Any]] = {
    _ATEN.pow.Tensor_Scalar: power,
    _ATEN.fmod.Tensor: truncated_remainder,
    _ATEN.fmod.Scalar: truncated_remainder,
    _ATEN.div.Tensor_mode: divided,
    _ATEN.div.Scalar_mode: divided,
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
