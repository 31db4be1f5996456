"""Elementwise operators without a kernel."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lowerdeck.torch_base import OpOverload

_ATEN = torch.ops.aten

# Integer dtype of the same width for each floating dtype; the sign bits coincide.
_BITS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


def sign_bit(self: torch.Tensor) -> torch.Tensor:
    """Return ``signbit``, also of negative zero."""
    if self.dtype == torch.bool:
        return torch.zeros_like(self)
    bits = _BITS.get(self.dtype)
    return (self if bits is None else self.view(bits)) < 0


def copy_sign(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return ``copysign`` of two tensors.

    Args:
        other: Source of the signs.
    """
    if not self.is_floating_point() and not other.is_floating_point():
        self = self.to(torch.float32)
    size = torch.abs(self if self.dtype != torch.bool else self.to(other.dtype))
    return torch.where(sign_bit(other), -size, size)


def copy_sign_of_number(self: torch.Tensor, other: float) -> torch.Tensor:
    """Return ``copysign`` of a tensor and a number."""
    size = torch.abs(self if self.is_floating_point() else self.to(torch.float32))
    return -size if math.copysign(1.0, other) < 0 else size


def power_of_two(self: torch.Tensor) -> torch.Tensor:
    """Return ``exp2``."""
    return torch.pow(2.0, self)


def larger_number(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return ``fmax``, which ignores NaN."""
    return _number(self, other, torch.maximum)


def smaller_number(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return ``fmin``, which ignores NaN."""
    return _number(self, other, torch.minimum)


def _number(
    left: torch.Tensor, right: torch.Tensor, choose: Callable[..., torch.Tensor]
) -> torch.Tensor:
    chosen = choose(left, right)
    if not chosen.is_floating_point():
        return chosen
    return torch.where(torch.isnan(left), right, torch.where(torch.isnan(right), left, chosen))


def hypotenuse(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return ``hypot``, scaled so that no square overflows."""
    first, second = torch.abs(self), torch.abs(other)
    long, short = torch.maximum(first, second), torch.minimum(first, second)
    ratio = torch.where((long == 0) | torch.isinf(long), torch.zeros_like(long), short / long)
    return long * torch.sqrt(ratio * ratio + 1)


def round_to_decimals(self: torch.Tensor, *, decimals: int) -> torch.Tensor:
    """Return ``round`` to a number of decimals.

    Args:
        decimals: Number of decimals; negative for tens, hundreds and so on.
    """
    scale = 10.0 ** abs(decimals)
    if decimals < 0:
        return torch.round(self / scale) * scale
    return torch.round(self * scale) / scale


def angle(self: torch.Tensor) -> Any:
    """Return ``angle`` of real numbers: pi for negative ones."""
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
    """Return ``addbmm``.

    Args:
        batch1: Matrices, shape (batch, rows, inner).
        batch2: Matrices, shape (batch, inner, columns).
        alpha: Factor of the products.
    """
    if not self.is_floating_point():
        # torch truncates the factors for integers.
        beta, alpha = int(beta), int(alpha)
    total = torch.bmm(batch1, batch2).sum(0, dtype=self.dtype)
    total = total if alpha == 1 else total * alpha
    if beta == 0:
        # torch ignores ``self`` if beta is 0, even where it is NaN.
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
    """Return ``_trilinear``, on which bilinear layers are built.

    Args:
        expand1: Dimensions to insert into the first operand.
        expand2: Dimensions to insert into the second operand.
        expand3: Dimensions to insert into the third operand.
        sumdim: Dimensions to sum over.
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
