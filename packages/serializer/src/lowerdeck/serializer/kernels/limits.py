"""Limits on kernel arguments beyond their kinds; a kernel aborts the process if one is violated.

The limits were found by calling every kernel of the official runtime with invalid arguments
(``tests/interop``); most kernels only return an error. Each kernel's limits are in its row of the
table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

from lowerdeck.serializer.flatbuffer.limits import MAX_RANK
from lowerdeck.serializer.pte import schema
from lowerdeck.serializer.pte.enums import ScalarType, TensorDataLocation

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
"""Sets of element types by their names in the table."""


# One more than the longest valid list of dimensions, sizes or indices; bounds the cost of shared
# lists.
_MOST_ITEMS = 17


class Arguments:
    """The arguments of one call; numbers computed at run time are None.

    Methods take the position of an argument in the call.
    """

    def __init__(self, values: list[schema.EValue], args: list[int], unknown: set[int]) -> None:
        """Wrap the arguments of a call.

        Args:
            values: Values of the method.
            args: Value indices of the arguments.
            unknown: Indices of the values that instructions write.
        """
        self._values = values
        self._args = args
        self._unknown = unknown

    def value(self, number: int) -> schema.KernelTypes:
        """Return the value of an argument."""
        return self._values[self._args[number]].val

    def tensor(self, number: int) -> schema.Tensor | None:
        """Return a tensor argument, or None for other kinds."""
        value = self.value(number)
        return value if isinstance(value, schema.Tensor) else None

    def tensors(self, number: int) -> list[schema.Tensor | None]:
        """Return the tensors of a list; None marks an omitted index."""
        value = self.value(number)
        if not isinstance(value, schema.TensorList | schema.OptionalTensorList):
            return []
        items = [self._values[at].val if at >= 0 else None for at in value.items[:_MOST_ITEMS]]
        return [item if isinstance(item, schema.Tensor) else None for item in items]

    def number(self, number: int) -> float | None:
        """Return a number stored in the file, or None."""
        return self._number(self._args[number])

    def numbers(self, number: int) -> list[float | None]:
        """Return the numbers of a list, None for computed ones."""
        value = self.value(number)
        items = value.items[:_MOST_ITEMS] if isinstance(value, schema.IntList) else []
        return [self._number(item) for item in items]

    def is_computed(self, number: int) -> bool:
        """Return whether an instruction writes a number, or one in a list."""
        value = self.value(number)
        is_list = isinstance(value, schema.IntList)
        items = value.items[:_MOST_ITEMS] if is_list else [self._args[number]]  # type: ignore[union-attr]
        return not self._unknown.isdisjoint(items)

    def _number(self, index: int) -> float | None:
        value = self._values[index].val
        if index in self._unknown or not isinstance(value, schema.Int | schema.Double):
            return None
        return value.int_val if isinstance(value, schema.Int) else value.double_val


def is_constant(value: schema.KernelTypes) -> bool:
    """Return whether a value is a tensor with constant data, in the file or external."""
    if not isinstance(value, schema.Tensor) or value.allocation_info is not None:
        return False
    extra = value.extra_tensor_info
    external = extra is not None and extra.location is TensorDataLocation.EXTERNAL
    return external or value.data_buffer_idx > 0


Limit = Callable[[Arguments], str | None]
"""Returns an error message for the arguments of a call, or None."""


def _positive(call: Arguments, *positions: int) -> str | None:
    """Check that numbers are positive: the kernel divides by them or loops up to them."""
    for at in positions:
        for number in call.numbers(at) or [call.number(at)]:
            if number is not None and not 1 <= number < 1 << 31:
                return f"found {number} in argument {at}, expected 1 to 2**31 - 1"
    return None


def _promoted(call: Arguments, *positions: int) -> str | None:
    """Check that uint16, uint32 and uint64 do not meet other dtypes: they do not promote."""
    kinds = {tensor.scalar_type for at in positions if (tensor := call.tensor(at))}
    if len(kinds) > 1 and kinds & _BARE_UNSIGNED:
        names = ", ".join(sorted(kind.name for kind in kinds))
        return f"found tensors of {names}, expected one dtype: uint16 to uint64 do not promote"
    return None


def _rank(call: Arguments, at: int, least: int, most: int = MAX_RANK) -> str | None:
    """Check that a tensor has ``least`` to ``most`` dimensions."""
    tensor = call.tensor(at)
    if tensor is None or least <= len(tensor.sizes) <= most:
        return None
    return f"found {len(tensor.sizes)} dimensions in argument {at}, expected {least} to {most}"


def _types(call: Arguments, at: int, allowed: str) -> str | None:
    """Check a tensor's element type."""
    tensor = call.tensor(at)
    if tensor is None or tensor.scalar_type in _TYPES[allowed]:
        return None
    names = ", ".join(sorted(kind.name for kind in _TYPES[allowed]))
    return f"found {tensor.scalar_type.name} in argument {at}, expected one of {names}"


def _dimension(call: Arguments, at: int, of: int, *, negative: bool = False) -> str | None:
    """Check that a number, or each of a list, is a dimension of a tensor.

    Computed numbers are rejected too: torch's dimensions are constants.
    """
    tensor = call.tensor(of)
    if tensor is None:
        return None
    if call.is_computed(at):
        return f"found a computed dimension in argument {at}, expected a constant"
    rank = len(tensor.sizes)
    least = -rank if negative else 0
    for number in call.numbers(at) or [call.number(at)]:
        if number is not None and not least <= number < rank:
            return f"found dimension {number} in argument {at}, expected {least} to {rank - 1}"
    return None


def _alike(call: Arguments, at: int, other: int) -> str | None:
    """Check that two tensors have the same sizes."""
    left, right = call.tensor(at), call.tensor(other)
    if left is None or right is None or left.sizes == right.sizes:
        return None
    return (
        f"found sizes {left.sizes} in argument {at}, expected {right.sizes} as in argument {other}"
    )


def _not_constant(call: Arguments, at: int) -> str | None:
    """Check that a tensor is not a constant: the kernel does not check its elements."""
    if is_constant(call.value(at)):
        return f"found a constant as argument {at}, expected a tensor whose elements are computed"
    return None


def _elements(call: Arguments, at: int) -> str | None:
    """Check that a tensor to be reduced is not empty."""
    tensor = call.tensor(at)
    if tensor is not None and not math.prod(tensor.sizes):
        return f"found no elements in argument {at}, expected at least one"
    return None


def _divisor(call: Arguments, at: int, of: int) -> str | None:
    """Check that the divisor of an integer tensor is not 0 when cast to the tensor's type."""
    tensor, number = call.tensor(of), call.number(at)
    if tensor is None or not isinstance(number, int) or tensor.scalar_type not in _INTEGRAL:
        return None
    if number % (1 << 8 * tensor.scalar_type.itemsize) == 0:
        return (
            f"found the divisor {number}, expected one that is not 0 as {tensor.scalar_type.name}"
        )
    return None


def _steps(call: Arguments, first: int, last: int, by: int) -> str | None:
    """Check that a range has fewer than 2**31 numbers; argument -1 means the default."""
    start = 0 if first < 0 else call.number(first)
    end, step = call.number(last), 1 if by < 0 else call.number(by)
    if start is None or end is None or not step:
        return None
    if not (math.isfinite(start) and math.isfinite(end) and math.isfinite(step)):
        return f"found a range from {start} to {end} by {step}, expected finite numbers"
    # A float quotient of small steps may be infinite; integers are exact.
    if abs((end - start) / step) >= (1 << 31) - 1:
        return f"found a range from {start} to {end} by {step}, expected fewer than 2**31 numbers"
    return None


def _indices(call: Arguments, at: int, of: int) -> str | None:
    """Check that indices cover at most the tensor's dimensions."""
    tensor = call.tensor(of)
    if tensor is None:
        return None
    used = sum(
        len(index.sizes) if index is not None and index.scalar_type in _MASKS else 1
        for index in call.tensors(at)
    )
    if used > len(tensor.sizes):
        return f"found indices for {used} dimensions, expected at most {len(tensor.sizes)}"
    return None


def _shape(call: Arguments, at: int) -> str | None:
    """Check that sizes do not contain both -1 and 0: the kernel divides by the known sizes."""
    sizes = call.numbers(at)
    if len(sizes) > MAX_RANK:
        return f"found too many sizes in argument {at}, expected at most {MAX_RANK}"
    if -1 in sizes and 0 in sizes:
        return f"found the sizes {sizes}, expected no 0 together with -1"
    return None


def parse_limit(word: str) -> Limit | None:
    """Return the limit of a word such as ``rank(0,3,3)``, or None for other words.

    Args:
        word: The name of a limit, and its numbers or names in parentheses.
    """
    name, _, inside = word.removesuffix(")").partition("(")
    if name not in _LIMITS:
        return None
    items = [int(item) if item.lstrip("-").isdigit() else item for item in inside.split(",")]
    return lambda call: _LIMITS[name](call, *items)


_LIMITS: Mapping[str, Callable[..., str | None]] = {
    "positive": _positive,
    "promoted": _promoted,
    "rank": _rank,
    "types": _types,
    "dimension": _dimension,
    "wrapped": partial(_dimension, negative=True),
    "alike": _alike,
    "computed": _not_constant,
    "elements": _elements,
    "divisor": _divisor,
    "steps": _steps,
    "indices": _indices,
    "shape": _shape,
}
