"""Operators without a kernel that a few others compute element by element."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lowerdeck.torch_base import OpOverload

_ATEN = torch.ops.aten

# Integers of the width of each floating type, whose sign is that of the number.
_BITS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


def sign_bit(self: torch.Tensor) -> torch.Tensor:
    """Return whether elements have a sign, that of zero counted."""
    if self.dtype == torch.bool:
        return torch.zeros_like(self)
    bits = _BITS.get(self.dtype)
    return (self if bits is None else self.view(bits)) < 0


def copy_sign(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return elements with the signs of others.

    Args:
        other: What the signs are taken from.
    """
    if not self.is_floating_point() and not other.is_floating_point():
        self = self.to(torch.float32)
    size = torch.abs(self if self.dtype != torch.bool else self.to(other.dtype))
    return torch.where(sign_bit(other), -size, size)


def copy_sign_of_number(self: torch.Tensor, other: float) -> torch.Tensor:
    """Return elements with the sign of a number."""
    size = torch.abs(self if self.is_floating_point() else self.to(torch.float32))
    return -size if math.copysign(1.0, other) < 0 else size


def power_of_two(self: torch.Tensor) -> torch.Tensor:
    """Return two to the power of each element."""
    return torch.pow(2.0, self)


def larger_number(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the larger ones of elements; what is not a number loses."""
    return _number(self, other, torch.maximum)


def smaller_number(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the smaller ones of elements; what is not a number loses."""
    return _number(self, other, torch.minimum)


def _number(
    left: torch.Tensor, right: torch.Tensor, choose: Callable[..., torch.Tensor]
) -> torch.Tensor:
    chosen = choose(left, right)
    if not chosen.is_floating_point():
        return chosen
    return torch.where(torch.isnan(left), right, torch.where(torch.isnan(right), left, chosen))


def hypotenuse(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the root of the sum of squares, scaled so that no square overflows."""
    first, second = torch.abs(self), torch.abs(other)
    long, short = torch.maximum(first, second), torch.minimum(first, second)
    ratio = torch.where((long == 0) | torch.isinf(long), torch.zeros_like(long), short / long)
    return long * torch.sqrt(ratio * ratio + 1)


def round_to_decimals(self: torch.Tensor, *, decimals: int) -> torch.Tensor:
    """Return elements rounded to decimals.

    Args:
        decimals: How many; tens, hundreds and so on when negative.
    """
    scale = 10.0 ** abs(decimals)
    if decimals < 0:
        return torch.round(self / scale) * scale
    return torch.round(self * scale) / scale


def angle(self: torch.Tensor) -> Any:
    """Return the angle of real numbers: that of what is below zero is half a turn."""
    if self.is_complex():
        return NotImplemented
    if not self.is_floating_point():
        return torch.where(self < 0, math.pi, 0.0).to(torch.float32)
    return torch.where(torch.isnan(self), self, torch.where(self < 0, math.pi, 0.0).to(self.dtype))


def add_products(
    self: torch.Tensor,
    batch1: torch.Tensor,
    batch2: torch.Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> torch.Tensor:
    """Return the sum of a batch of products, added to ``self``.

    Args:
        self: What is added to.
        batch1: Matrices, shape (batch, rows, inner).
        batch2: Matrices, shape (batch, inner, columns).
        alpha: Factor of the products.
    """
    if not self.is_floating_point():
        # torch cuts the factors of integers off.
        beta, alpha = int(beta), int(alpha)
    total = torch.bmm(batch1, batch2).sum(0, dtype=self.dtype)
    total = total if alpha == 1 else total * alpha
    if beta == 0:
        # Not even what is not a number counts then.
        return total.clone()
    return (self if beta == 1 else self * beta) + total


def three_factors(
    i1: torch.Tensor,
    i2: torch.Tensor,
    i3: torch.Tensor,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,  # noqa: ARG001 - the schema's
) -> torch.Tensor:
    """Return sums of products of three, what a bilinear layer is made of.

    Args:
        expand1: Dimensions that the first lacks.
        expand2: Dimensions that the second lacks.
        expand3: Dimensions that the third lacks.
        sumdim: Dimensions that are summed over.
    """
    factors = []
    for factor, lacking in ((i1, expand1), (i2, expand2), (i3, expand3)):
        wide = factor
        for dim in sorted(lacking):
            wide = wide.unsqueeze(dim)
        factors.append(wide)
    product = factors[0] * factors[1] * factors[2]
    return product.sum(list(sumdim), dtype=product.dtype) if sumdim else product


ELEMENTWISE: dict[OpOverload, Callable[..., Any]] = {
    _ATEN.signbit.default: sign_bit,
    _ATEN.copysign.Tensor: copy_sign,
    _ATEN.copysign.Scalar: copy_sign_of_number,
    _ATEN.exp2.default: power_of_two,
    _ATEN.fmax.default: larger_number,
    _ATEN.fmin.default: smaller_number,
    _ATEN.hypot.default: hypotenuse,
    _ATEN.round.decimals: round_to_decimals,
    _ATEN.angle.default: angle,
    _ATEN.addbmm.default: add_products,
    _ATEN._trilinear.default: three_factors,
}
