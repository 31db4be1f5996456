"""Scalar operators of the runtime: arithmetic on sizes, comparisons, rounding."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch

Scalar = int | float | bool

_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1


def _remainder(left: int, right: int) -> int:
    """Return the remainder with the sign of ``left``; Python's has that of ``right``."""
    remainder = abs(left) % abs(right)
    return -remainder if left < 0 else remainder


def _quotient(left: int, right: int) -> int:
    """Return the quotient rounded towards zero, as in the runtime's ``floordiv.int``."""
    quotient = abs(left) // abs(right)
    return quotient if (left < 0) == (right < 0) else -quotient


def _local_scalar(tensor: torch.Tensor) -> Scalar:
    value: Scalar = tensor.item()
    return value


_PRIMITIVES: dict[str, Callable[..., Any]] = {
    "add.Scalar": operator.add,
    "sub.Scalar": operator.sub,
    "mul.Scalar": operator.mul,
    "floordiv.Scalar": operator.floordiv,
    "floordiv.int": _quotient,
    "truediv.Scalar": operator.truediv,
    "mod.Scalar": _remainder,
    "mod.int": _remainder,
    "eq.Scalar": operator.eq,
    "lt.Scalar": operator.lt,
    "le.Scalar": operator.le,
    "gt.Scalar": operator.gt,
    "ge.Scalar": operator.ge,
    "sym_max.Scalar": max,
    "sym_min.Scalar": min,
    "neg.Scalar": operator.neg,
    "ceil.Scalar": math.ceil,
    "round.Scalar": round,
    "trunc.Scalar": math.trunc,
    "sym_float.Scalar": float,
    "sym_int.Scalar": int,
    "sym_not.Scalar": operator.not_,
    "sym_ite.Scalar": lambda condition, then, other: then if condition else other,
}

SCALAR_OPERATORS: dict[str, Callable[..., Any]] = {
    **{f"executorch_prim::{name}": function for name, function in _PRIMITIVES.items()},
    "aten::sym_size.int": lambda tensor, dim: tensor.shape[dim],
    "aten::sym_numel": torch.Tensor.numel,
    "aten::_local_scalar_dense": _local_scalar,
}
"""Functions of the operators that return a number, by full name."""


def in_range(value: Scalar) -> Scalar:
    """Return ``value`` if it is not an integer of more than 64 bits.

    Raises:
        OverflowError: The integer does not fit in 64 bits; the runtime would wrap it around.
    """
    if isinstance(value, int) and not _INT64_MIN <= value <= _INT64_MAX:
        raise OverflowError(f"{value} does not fit in int64")
    return value
