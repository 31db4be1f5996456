"""Limits that arguments of a kernel must keep beyond their kinds, or it ends the process.

Found by calling every kernel of the official runtime with hostile arguments: most combinations
that are wrong come back as an error. Which kernel has which limits is told in its row of the
table; ``tests/interop`` holds the search.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from lowerdeck.serializer.flatbuffer.limits import MAX_RANK
from lowerdeck.serializer.pte import schema
from lowerdeck.serializer.pte.enums import ScalarType

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
_STANDARD = frozenset(ScalarType(number) for number in (*range(8), 11, 15))
_TYPES: Mapping[str, frozenset[ScalarType]] = {
    "floating": _FLOATING,
    "standard": _STANDARD,
    "numbers": _STANDARD - {ScalarType.BOOL},
    "indices": frozenset({ScalarType.INT, ScalarType.LONG}),
}
"""The sets of element types that rows of the table name."""


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

    def is_computed(self, number: int) -> bool:
        """Return whether an instruction writes a number argument, or one of a list."""


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
    allowed: str

    def __call__(self, call: Arguments) -> str | None:
        tensor, allowed = call.tensor(self.position), _TYPES[self.allowed]
        if tensor is not None and tensor.scalar_type not in allowed:
            names = ", ".join(sorted(kind.name for kind in allowed))
            return (
                f"found {tensor.scalar_type.name} in argument {self.position}, expected "
                f"one of {names}"
            )
        return None


@dataclass(frozen=True, slots=True)
class _Dimension:
    """A number, or each of a list, must be a dimension of a tensor.

    It must be known, too: torch never computes one, so that no right file does.
    """

    position: int
    of: int
    negative: bool = False

    def __call__(self, call: Arguments) -> str | None:
        tensor = call.tensor(self.of)
        if tensor is None:
            return None
        rank = len(tensor.sizes)
        if call.is_computed(self.position):
            return f"found a computed dimension in argument {self.position}, expected a number"
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
class Steps:
    """The numbers from a start to an end must be fewer than 2**31; -1 stands for a default."""

    start: int
    end: int
    step: int

    def __call__(self, call: Arguments) -> str | None:
        """Return what is wrong with the arguments of a call, or None."""
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
class Shape:
    """Sizes of which one may be -1, but then none 0: the kernel divides by the others."""

    position: int

    def __call__(self, call: Arguments) -> str | None:
        """Return what is wrong with the arguments of a call, or None."""
        sizes = call.numbers(self.position)
        if len(sizes) > MAX_RANK:
            return f"found more than {MAX_RANK} sizes in argument {self.position}"
        if -1 in sizes and 0 in sizes:
            return f"found the sizes {sizes}, expected no 0 beside a -1"
        return None


def parse_limit(word: str) -> Limit | None:
    """Return the limit that a word of a row says, such as ``rank(0,3,3)``; None for others.

    Args:
        word: The name of a limit, and its numbers or names in parentheses.
    """
    name, _, inside = word.removesuffix(")").partition("(")
    items = [int(item) if item.lstrip("-").isdigit() else item for item in inside.split(",")]
    make = _LIMITS.get(name)
    return make(*items) if make is not None else None


_LIMITS: Mapping[str, Callable[..., Limit]] = {
    "promoted": lambda *positions: _Promoted(positions),
    "rank": _Rank,
    "types": _Types,
    "dimension": _Dimension,
    "wrapped": lambda position, of: _Dimension(position, of, negative=True),
    "alike": _Alike,
    "computed": _NotConstant,
    "elements": _Elements,
    "divisor": _Divisor,
    "steps": Steps,
    "indices": _Indices,
    "shape": Shape,
}
