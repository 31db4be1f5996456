"""Integer operators whose kernels are missing, or compute in float64.

In the runtime 1.4.1 products, sums of two tensors, floor division and sums over several dimensions
are computed in integers. The sum over one dimension is not: above 2^53 float64 does not represent
every integer, and results out of range become the smallest integer, where torch wraps around.
That sum also accumulates float64 in float32.
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
    """Return a sum over one dimension as a sum over two, which the kernel computes in its dtype.

    Byte-level language models (BLT) sum hashes that wrap around.

    Args:
        keepdim: Whether reduced dimensions stay, with size 1.
        dtype: Dtype of the sum.
    """
    result_type = dtype
    if result_type is None:
        result_type = self.dtype if self.is_floating_point() else torch.int64
    if not dim or len(dim) != 1 or self.dim() == 0 or not _is_narrowed(self.dtype, result_type):
        return NotImplemented
    both = [dim[0] % self.dim(), self.dim()]
    result = torch.sum(self.unsqueeze(-1), both, keepdim, dtype=dtype)
    return result.squeeze(-1) if keepdim else result


def product(self: torch.Tensor, mat2: torch.Tensor) -> torch.Tensor:
    """Return ``_int_mm``: the product of 8-bit matrices, accumulated in 32 bits.

    Args:
        self: The rows, signed or not.
    """
    return torch.mm(self.to(torch.int32), mat2.to(torch.int32))


def _is_narrowed(source: torch.dtype, result: torch.dtype) -> bool:
    """Return whether a sum may exceed 2^53 or the range of its dtype, or is of float64."""
    if source == result == torch.float64:
        return True
    if result.is_floating_point or result.is_complex or result == torch.bool:
        return False
    if source.is_floating_point or source.is_complex:
        return False
    return result != torch.int64 or source in (torch.int32, torch.int64)


INTEGERS: dict[OpOverload, Callable[..., Any]] = {
    _ATEN.sum.dim_IntList: total,
    _ATEN._int_mm.default: product,
}
