"""Decompositions of operators whose kernel is missing or wrong for some arguments.

A rule returns ``NotImplemented`` for calls that the kernel computes correctly; torch then keeps
the operator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch

from lowerdeck.emitter._torch_private import is_known, reference_decomposition
from lowerdeck.torch_base import OpOverload

_ATEN = torch.ops.aten


def remainder(self: torch.Tensor, other: Any) -> Any:
    """Return ``remainder`` of integers and of float64.

    The kernels round quotients of integers toward zero, and compute float64 in float32.

    Args:
        other: The divisor, a tensor or a number.
    """
    dtypes = [operand.dtype for operand in (self, other) if isinstance(operand, torch.Tensor)]
    if torch.float64 in dtypes:
        rest = torch.fmod(self, other)
        return torch.where((rest != 0) & ((rest < 0) != (other < 0)), rest + other, rest)
    if isinstance(other, float) or any(dtype.is_floating_point for dtype in dtypes):
        return NotImplemented
    return self - torch.div(self, other, rounding_mode="floor") * other


def _unless_float64(target: OpOverload) -> Callable[..., Any]:
    """Return torch's decomposition for float64 only: the kernel computes it in float32."""
    rule = reference_decomposition(target)

    @wraps(rule)
    def decomposed(self: torch.Tensor, *args: Any, **options: Any) -> Any:
        return NotImplemented if self.dtype != torch.float64 else rule(self, *args, **options)

    return decomposed


def log_softmax(self: torch.Tensor, dim: int, _half_to_float: bool) -> Any:
    """Return ``log_softmax`` of float64, which the kernel rejects."""
    if self.dtype != torch.float64:
        return NotImplemented
    if any(isinstance(size, int) and size == 0 for size in self.shape):
        # torch has no maximum of an empty tensor.
        return self.clone()
    shifted = self - torch.amax(self, dim, keepdim=True)
    return shifted - torch.log(torch.sum(torch.exp(shifted), dim, keepdim=True))


def constant_pad(self: torch.Tensor, pad: Sequence[int], value: float = 0) -> Any:
    """Return negative padding as slices: the kernel cannot shrink a tensor."""
    cuts = [is_known(amount < 0) for amount in pad]
    if not any(cuts):
        return NotImplemented
    result, grown = self, list(pad)
    for index in range(0, len(pad), 2):
        dim = self.dim() - 1 - index // 2
        start, stop = 0, result.size(dim)
        if cuts[index]:
            start, grown[index] = -pad[index], 0
        if cuts[index + 1]:
            stop, grown[index + 1] = stop + pad[index + 1], 0
        if cuts[index] or cuts[index + 1]:
            result = _ATEN.slice.Tensor(result, dim, start, stop)
    if not all(is_known(amount == 0) for amount in grown):
        return _ATEN.constant_pad_nd.default(result, grown, value)
    return result.clone()


def roll(self: torch.Tensor, shifts: Sequence[Any], dims: Sequence[int] = ()) -> Any:
    """Roll the flattened tensor if there are no ``dims``: the kernel needs them."""
    if dims:
        return NotImplemented
    return torch.roll(self.reshape(-1), shifts, [0]).reshape(self.shape)


RANGES: ContextVar[Mapping[Any, Any] | None] = ContextVar("RANGES", default=None)
"""Ranges of symbols in the program being decomposed; while tracing, torch assumes sizes >= 2."""


def linear(
    input: torch.Tensor,  # noqa: A002 - torch's name
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> Any:
    """Return ``linear`` of a vector via a one-row matrix: the kernel needs two dimensions."""
    if input.dim() != 1 or weight.dim() != 2:
        return NotImplemented
    return _ATEN.linear.default(input.unsqueeze(0), weight, bias).squeeze(0)


def unbind(self: torch.Tensor, dim: int = 0) -> Any:
    """Return ``unbind`` of a dynamic shape as selects: the kernel does not resize its outputs."""
    if _has_one_shape(self):
        return NotImplemented
    return [torch.select(self, dim, index) for index in range(self.size(dim))]


def split(self: torch.Tensor, split_size: Any, dim: int = 0) -> Any:
    """Return ``split_with_sizes`` for a dynamic shape: the kernel does not resize its outputs."""
    if _has_one_shape(self) and isinstance(split_size, int):
        return NotImplemented
    return _ATEN.split_with_sizes.default(self, _part_sizes(self, split_size, dim), dim)


def _part_sizes(self: torch.Tensor, split_size: Any, dim: int) -> list[Any]:
    whole = self.size(dim)
    if is_known(whole == 0):
        return [whole]
    # torch guards on the number of parts, so it is static.
    count = int((whole + split_size - 1) // split_size)
    return [split_size] * (count - 1) + [whole - split_size * (count - 1)]


def _has_one_shape(tensor: torch.Tensor) -> bool:
    return all(isinstance(size, int) for size in tensor.shape)


def logit(self: torch.Tensor, eps: float | None = None) -> Any:
    """Return ``logit`` of float16 and bfloat16 in float32: the kernel rejects them."""
    if self.dtype not in (torch.float16, torch.bfloat16):
        return NotImplemented
    return torch.logit(self.to(torch.float32), eps).to(self.dtype)


def empty(size: Sequence[Any], _order: Sequence[int], **options: Any) -> torch.Tensor:
    """Return ``empty`` by the kernel that sets dynamic shapes.

    The elements stay uninitialized. The call marks the value as written for checks of the memory
    plan.
    """
    return torch.empty(size, dtype=options.get("dtype"))


def copy_strided(self: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:  # noqa: ARG001
    """Return a copy; ignore ``stride``, because a ``.pte`` file has dim orders, not strides."""
    copied: torch.Tensor = _ATEN.clone.default(self)
    return copied


def as_strided(
    self: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> Any:
    """Return the tensor itself if size and strides describe all its elements in order."""
    same = len(size) == self.dim() and is_known((storage_offset or 0) == self.storage_offset())
    for requested, actual, step, own in zip(size, self.shape, stride, self.stride(), strict=False):
        # The stride of a dimension of size 1 is irrelevant.
        same = (
            same
            and is_known(requested == actual)
            and (is_known(actual == 1) or is_known(step == own))
        )
    return torch.ops.aten.alias.default(self) if same else NotImplemented


def hypotenuse(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return ``hypot``, scaled so that no square overflows."""
    first, second = torch.abs(self), torch.abs(other)
    long, short = torch.maximum(first, second), torch.minimum(first, second)
    ratio = torch.where((long == 0) | torch.isinf(long), torch.zeros_like(long), short / long)
    return long * torch.sqrt(ratio * ratio + 1)


def histogram(
    self: torch.Tensor,
    bins: int = 100,
    min: float = 0,  # noqa: A002 - the name in the schema
    max: float = 0,  # noqa: A002 - the name in the schema
) -> Any:
    """Return ``histc``: the number of elements in each of several equal bins.

    Args:
        min: Start of the first bin.
        max: End of the last bin, which includes it.
    """
    if min >= max:
        # The range is that of the elements.
        return NotImplemented
    kind = self.dtype if self.is_floating_point() else torch.float32
    edges = torch.linspace(min, max, bins + 1, dtype=kind)
    values = self.reshape(-1, 1).to(kind)
    above, below = values >= edges[:-1], values < edges[1:]
    last = (values == edges[-1]) & (torch.arange(bins) == bins - 1)
    return ((above & below) | last).to(self.dtype).sum(0).to(self.dtype)


QUIRKS: dict[OpOverload, Callable[..., Any]] = {
    torch.ops.prims.copy_strided.default: copy_strided,
    _ATEN.as_strided.default: as_strided,
    # The kernel aborts on a negative dimension.
    _ATEN.narrow_copy.default: lambda self, *args: torch.narrow(self, *args).clone(),
    _ATEN.remainder.Tensor: remainder,
    _ATEN.remainder.Scalar: remainder,
    _ATEN._log_softmax.default: log_softmax,
    _ATEN.constant_pad_nd.default: constant_pad,
    _ATEN.roll.default: roll,
    _ATEN.linear.default: linear,
    _ATEN.unbind.int: unbind,
    _ATEN.split.Tensor: split,
    _ATEN.logit.default: logit,
    _ATEN.empty_permuted.default: empty,
    _ATEN._adaptive_avg_pool2d.default: _unless_float64(_ATEN._adaptive_avg_pool2d.default),
    _ATEN.upsample_bilinear2d.vec: _unless_float64(_ATEN.upsample_bilinear2d.vec),
    _ATEN.empty_strided.default: empty,
    _ATEN.hypot.default: hypotenuse,
    _ATEN.histc.default: histogram,
    _ATEN.__lshift__.Tensor: torch.bitwise_left_shift,
    _ATEN.__lshift__.Scalar: torch.bitwise_left_shift,
    _ATEN.__rshift__.Tensor: torch.bitwise_right_shift,
    _ATEN.__rshift__.Scalar: torch.bitwise_right_shift,
}
