"""What kernels of ExecuTorch 1.4.1 take beyond the kinds of their arguments, where they abort.

Found by calling every kernel of the official runtime with hostile arguments: most combinations
that are wrong come back as an error, those of this table end the process. ``KERNEL_LIMITS`` is
data: for each kernel the limits that its arguments must keep. ``tests/interop`` holds the search.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from lowerdeck.serializer import schema
from lowerdeck.serializer.enums import ScalarType
from lowerdeck.serializer.limits import MAX_RANK

_BARE_UNSIGNED = {ScalarType.UINT16, ScalarType.UINT32, ScalarType.UINT64}
_FLOATING = frozenset(
    {
        *(ScalarType.HALF, ScalarType.BFLOAT16, ScalarType.FLOAT, ScalarType.DOUBLE),
        *(ScalarType.COMPLEX_FLOAT, ScalarType.COMPLEX_DOUBLE),
    }
)
_INTEGRAL = frozenset(
    {
        *(ScalarType.BYTE, ScalarType.CHAR, ScalarType.SHORT, ScalarType.INT, ScalarType.LONG),
        *(ScalarType.BOOL, *_BARE_UNSIGNED),
    }
)
_MASKS = {ScalarType.BOOL, ScalarType.BYTE}


class Arguments(Protocol):
    """The arguments of one call; what is known only at run time is None."""

    def tensor(self, number: int) -> schema.Tensor | None:
        """Return a tensor argument, or None for any other."""

    def tensors(self, number: int) -> list[schema.Tensor | None]:
        """Return the tensors of a list; None stands for an index that was left out."""

    def number(self, number: int) -> float | None:
        """Return a number that the file gives."""

    def numbers(self, number: int) -> list[float | None]:
        """Return the numbers of a list."""

    def is_constant(self, number: int) -> bool:
        """Return whether the file gives the bytes of a tensor argument."""


Limit = Callable[[Arguments], str | None]
"""Returns what is wrong with the arguments of a call, or None."""


@dataclass(frozen=True, slots=True)
class _Promoted:
    """Tensors whose types are promoted: uint16, uint32 and uint64 have no promotion."""

    positions: tuple[int, ...]

    def __call__(self, call: Arguments) -> str | None:
        kinds = {tensor.scalar_type for at in self.positions if (tensor := call.tensor(at))}
        if len(kinds) > 1 and kinds & _BARE_UNSIGNED:
            names = ", ".join(sorted(kind.name for kind in kinds))
            return f"found tensors of {names}, expected one type where one is bare unsigned"
        return None


@dataclass(frozen=True, slots=True)
class _Rank:
    """A tensor must have from ``least`` to ``most`` dimensions."""

    position: int
    least: int
    most: int = 16

    def __call__(self, call: Arguments) -> str | None:
        tensor = call.tensor(self.position)
        if tensor is not None and not self.least <= len(tensor.sizes) <= self.most:
            return (
                f"found {len(tensor.sizes)} dimensions in argument {self.position}, expected "
                f"{self.least} to {self.most}"
            )
        return None


@dataclass(frozen=True, slots=True)
class _Types:
    """A tensor must have one of the types."""

    position: int
    allowed: frozenset[ScalarType]

    def __call__(self, call: Arguments) -> str | None:
        tensor = call.tensor(self.position)
        if tensor is not None and tensor.scalar_type not in self.allowed:
            names = ", ".join(sorted(kind.name for kind in self.allowed))
            return (
                f"found {tensor.scalar_type.name} in argument {self.position}, expected "
                f"one of {names}"
            )
        return None


@dataclass(frozen=True, slots=True)
class _Dimension:
    """A number, or each of a list, must be a dimension of a tensor (of the first in a list)."""

    position: int
    of: int
    negative: bool = False

    def __call__(self, call: Arguments) -> str | None:
        tensor = call.tensor(self.of)
        if tensor is None:
            return None
        rank = len(tensor.sizes)
        least = -rank if self.negative else 0
        for number in call.numbers(self.position) or [call.number(self.position)]:
            if number is not None and not least <= number < rank:
                return (
                    f"found dimension {number} in argument {self.position}, expected {least} to "
                    f"{rank - 1}"
                )
        return None


@dataclass(frozen=True, slots=True)
class _Alike:
    """Two tensors must have the same sizes."""

    position: int
    other: int

    def __call__(self, call: Arguments) -> str | None:
        tensor, other = call.tensor(self.position), call.tensor(self.other)
        if tensor is not None and other is not None and tensor.sizes != other.sizes:
            return (
                f"found sizes {tensor.sizes} in argument {self.position}, expected "
                f"{other.sizes}, those of argument {self.other}"
            )
        return None


@dataclass(frozen=True, slots=True)
class _NotConstant:
    """A tensor whose numbers the kernel trusts, so that no file may give them."""

    position: int

    def __call__(self, call: Arguments) -> str | None:
        if call.is_constant(self.position):
            return f"found a constant as argument {self.position}, whose numbers are not checked"
        return None


@dataclass(frozen=True, slots=True)
class _Elements:
    """A tensor that is reduced must have elements."""

    position: int

    def __call__(self, call: Arguments) -> str | None:
        tensor = call.tensor(self.position)
        if tensor is not None and not math.prod(tensor.sizes):
            return f"found no elements in argument {self.position}"
        return None


@dataclass(frozen=True, slots=True)
class _Divisor:
    """A number that an integer tensor is divided by must not become 0 in the tensor's type."""

    position: int
    of: int

    def __call__(self, call: Arguments) -> str | None:
        tensor, number = call.tensor(self.of), call.number(self.position)
        if tensor is None or not isinstance(number, int) or tensor.scalar_type not in _INTEGRAL:
            return None
        if number % (1 << 8 * tensor.scalar_type.itemsize) == 0:
            return f"found the divisor {number}, which is 0 as {tensor.scalar_type.name}"
        return None


@dataclass(frozen=True, slots=True)
class _Steps:
    """The numbers from a start to an end must be fewer than 2**31; -1 stands for a default."""

    start: int
    end: int
    step: int

    def __call__(self, call: Arguments) -> str | None:
        start = 0 if self.start < 0 else call.number(self.start)
        end, step = call.number(self.end), 1 if self.step < 0 else call.number(self.step)
        if start is None or end is None or not step:
            return None
        if not (math.isfinite(start) and math.isfinite(end) and math.isfinite(step)):
            return f"found a range from {start} to {end}, expected finite numbers"
        # In floats the quotient of small steps has no end; integers are exact.
        if abs((end - start) / step) >= (1 << 31) - 1:
            return f"found a range from {start} to {end} by {step}, expected below 2**31 numbers"
        return None


@dataclass(frozen=True, slots=True)
class _Indices:
    """Indices must be an optional list, and name at most the dimensions that the tensor has."""

    position: int
    of: int

    def __call__(self, call: Arguments) -> str | None:
        tensor = call.tensor(self.of)
        if tensor is None:
            return None
        used = sum(
            len(index.sizes) if index is not None and index.scalar_type in _MASKS else 1
            for index in call.tensors(self.position)
        )
        if used > len(tensor.sizes):
            return f"found indices for {used} dimensions, expected at most {len(tensor.sizes)}"
        return None


@dataclass(frozen=True, slots=True)
class _Shape:
    """Sizes of which one may be -1, but then none 0: the kernel divides by the others."""

    position: int

    def __call__(self, call: Arguments) -> str | None:
        sizes = call.numbers(self.position)
        if len(sizes) > MAX_RANK:
            return f"found more than {MAX_RANK} sizes in argument {self.position}"
        if -1 in sizes and 0 in sizes:
            return f"found the sizes {sizes}, expected no 0 beside a -1"
        return None


_PAIRS = """
add.out sub.out mul.out div.out div.out_mode floor_divide.out fmod.Tensor_out
remainder.Tensor_out pow.Tensor_Tensor_out maximum.out minimum.out bitwise_and.Tensor_out
bitwise_or.Tensor_out bitwise_xor.Tensor_out bitwise_left_shift.Tensor_out
bitwise_right_shift.Tensor_out eq.Tensor_out ne.Tensor_out lt.Tensor_out le.Tensor_out
gt.Tensor_out ge.Tensor_out
"""
_SIGNED_AND_BYTES = frozenset(ScalarType(number) for number in (*range(8), 11, 15))

_OF_ONE: Mapping[str, tuple[Limit, ...]] = {
    "_fft_c2r.out": (_Types(4, _FLOATING), _Dimension(1, 0)),
    "_fft_r2c.out": (_Types(0, _FLOATING),),
    "amax.out": (_Elements(0),),
    "amin.out": (_Elements(0),),
    "arange.out": (_Steps(-1, 0, -1),),
    "arange.start_out": (_Steps(0, 1, 2),),
    "argmax.out": (_Elements(0),),
    "argmin.out": (_Elements(0),),
    "bmm.out": (_Rank(0, 3, 3), _Rank(1, 3, 3)),
    "cat.out": (_Dimension(1, 2, negative=True),),
    "clamp.Tensor_out": (_Promoted((0, 1, 2)),),
    "convolution.out": (_Types(2, _SIGNED_AND_BYTES - {ScalarType.BOOL}),),
    "cumsum.out": (_Types(0, _SIGNED_AND_BYTES),),
    "div.Scalar_mode_out": (_Divisor(1, 0),),
    "div.out": (_Types(2, _FLOATING),),
    "embedding.out": (_Types(1, frozenset({ScalarType.INT, ScalarType.LONG})),),
    "index.Tensor_out": (_Indices(1, 0),),
    "index_put.out": (_Indices(1, 0),),
    "index_put_": (_Indices(1, 0), _Rank(2, 1)),
    "max_pool2d_with_indices_backward.grad_input": (_Alike(7, 0), _NotConstant(7)),
    "narrow_copy.out": (_Dimension(1, 0),),
    "native_group_norm.out": (_Rank(0, 2), _Rank(1, 1), _Rank(2, 1)),
    "remainder.Scalar_out": (_Divisor(1, 0),),
    "sym_size.int": (_Dimension(1, 0),),
    "unfold_copy.out": (_Dimension(1, 0, negative=True),),
    "view_copy.out": (_Shape(1),),
    "where.self_out": (_Promoted((1, 2)),),
}


def _all() -> dict[str, tuple[Limit, ...]]:
    limits: dict[str, tuple[Limit, ...]] = {
        f"aten::{name}": (_Promoted((0, 1)),) for name in _PAIRS.split()
    }
    for name, more in _OF_ONE.items():
        limits[f"aten::{name}"] = (*limits.get(f"aten::{name}", ()), *more)
    return limits


KERNEL_LIMITS: Mapping[str, tuple[Limit, ...]] = _all()
"""The limits of each kernel that has some, by its full name."""
