"""Exact integer arithmetic for operators whose kernels compute in float64, or are missing.

Hashes of byte sequences in Byte Latent Transformers (`blt` of transformers) are sums of products
beyond 2^53, where float64 does not represent every integer. In runtime 1.4.1 products, sums of two
tensors and sums over several dimensions use integer arithmetic. The sum over one dimension does
not; it also accumulates float64 in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lowerdeck.torch_base import OpOverload

_ATEN = torch.ops.aten


def total(
    self: torch.Tensor,
    dim: Sequence[int] | None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """Return a sum over one dimension as one over two: that kernel computes in the tensor's dtype.

    Args:
        keepdim: Whether reduced dimensions stay, with size 1.
        dtype: Dtype of the sum.
    """
    is_wide = self.dtype in (torch.int64, torch.float64) and dtype in (None, self.dtype)
    if not is_wide or self.dim() == 0 or not dim or len(dim) != 1:
        return NotImplemented
    dims = [dim[0] % self.dim(), self.dim()]
    result = torch.sum(self.unsqueeze(-1), dims, keepdim, dtype=dtype)
    return result.squeeze(-1) if keepdim else result


def remainder_of_number(self: float, other: torch.Tensor) -> torch.Tensor:
    """Return ``remainder`` of a number and a tensor."""
    return torch.remainder(torch.full((), self, dtype=torch.result_type(self, other)), other)


def product(self: torch.Tensor, mat2: torch.Tensor) -> torch.Tensor:
    """Return ``_int_mm``: the product of 8-bit matrices, accumulated in 32 bits.

    Args:
        self: The left matrix, int8 or uint8.
    """
    return torch.mm(self.to(torch.int32), mat2.to(torch.int32))


INTEGERS: dict[OpOverload, Callable[..., Any]] = {
    _ATEN.sum.dim_IntList: total,
    _ATEN.remainder.Scalar_Tensor: remainder_of_number,
    _ATEN._int_mm.default: product,
}
