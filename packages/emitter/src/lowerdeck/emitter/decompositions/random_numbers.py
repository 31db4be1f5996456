"""Decompose random operators into the two random kernels, uniform and normal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lowerdeck.torch_base import OpOverload

_ATEN = torch.ops.aten


def rand_like(self: torch.Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    """Return ``rand_like`` as ``rand`` of the same shape."""
    return torch.rand(self.shape, dtype=dtype or self.dtype, device=self.device)


def randn_like(self: torch.Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    """Return ``randn_like`` as ``randn`` of the same shape."""
    return torch.randn(self.shape, dtype=dtype or self.dtype, device=self.device)


def uniform(self: torch.Tensor, from_: float = 0.0, to: float = 1.0, **_: Any) -> Any:
    """Return ``uniform`` as a scaled ``rand_like``."""
    return rand_like(self) * (to - from_) + from_


def normal_in_shape(self: torch.Tensor, mean: float = 0.0, std: float = 1.0, **_: Any) -> Any:
    """Return ``normal_functional`` as a scaled ``randn_like``."""
    return randn_like(self) * std + mean


def bernoulli(self: torch.Tensor, p: float, **_: Any) -> Any:
    """Return ``bernoulli`` with the probability ``p``."""
    return (torch.rand(self.shape, device=self.device) < p).to(self.dtype)


def dropout(self: torch.Tensor, p: float, train: bool | None) -> Any:
    """Return ``native_dropout`` and its mask: the kernel does not scale the kept elements."""
    if train is False:
        return self.clone(), torch.ones(self.shape, dtype=torch.bool, device=self.device)
    kept_mask = torch.rand(self.shape, device=self.device) >= p
    factor = 0.0 if p == 1 else 1.0 / (1.0 - p)
    return self * kept_mask * factor, kept_mask


def randint(high: Any, size: Sequence[Any], **options: Any) -> Any:
    """Return ``randint`` from 0 to ``high``, exclusive."""
    return randint_between(0, high, size, **options)


def randint_between(
    low: Any, high: Any, size: Sequence[Any], *, dtype: torch.dtype | None = None, **_: Any
) -> Any:
    """Return ``randint`` from ``low`` to ``high``, exclusive."""
    if not isinstance(low, int) or not isinstance(high, int) or high - low > _EXACT:
        return NotImplemented
    # The kernel draws doubles below 1, which may round to 1 in float32.
    drawn = torch.clamp(torch.floor(torch.rand(size) * (high - low)), max=high - low - 1)
    return drawn.to(dtype or torch.int64) + low


# Number of distinct uniform float32 values.
_EXACT = 2**24

RANDOM_NUMBERS: dict[OpOverload, Callable[..., Any]] = {
    _ATEN.rand_like.default: rand_like,
    _ATEN.randn_like.default: randn_like,
    _ATEN.uniform.default: uniform,
    _ATEN.normal_functional.default: normal_in_shape,
    _ATEN.bernoulli.p: bernoulli,
    _ATEN.native_dropout.default: dropout,
    _ATEN.randint.default: randint,
    _ATEN.randint.low: randint_between,
}
