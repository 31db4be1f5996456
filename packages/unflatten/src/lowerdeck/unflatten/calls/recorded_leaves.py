"""What a leaf of a call's arguments was when it was recorded, where no other may be given."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import lru_cache
from typing import Any

import torch
from torch.fx import Proxy

from lowerdeck.torch_base import plain_number, varies
from lowerdeck.unflatten.sizes.guards import SizeLimits


def set_fields(made: Any, state: Sequence[Any]) -> None:
    """Set the fields of a frozen dataclass; a former version may have pickled fewer of them.

    Args:
        made: It.
        state: The values of the fields, in their order.
    """
    for number, each in enumerate(fields(made)):
        if number < len(state):
            value = state[number]
        else:
            value = each.default if each.default_factory is MISSING else each.default_factory()
        object.__setattr__(made, each.name, value)


@dataclass(frozen=True, slots=True)
class RecordedTensor:
    """A tensor among the arguments of a call.

    Attributes:
        shape: Its sizes; None where one may vary.
        dtype: Its type.
        twin: The number of the earlier leaf that was the same tensor, of which the program reads
            one alone; None where there was none.
        limits: What its sizes and those of the leaves before it must meet beside that; None where
            nothing.
    """

    shape: tuple[int | None, ...]
    dtype: torch.dtype
    twin: int | None = None
    limits: SizeLimits | None = None

    def __setstate__(self, state: Sequence[Any]) -> None:
        """Take what was pickled."""
        set_fields(self, state)

    def fits(self, value: Any) -> bool:
        """Return whether ``value`` may be passed in its place."""
        if isinstance(value, Proxy):
            # It has no shape to check.
            return True
        if not isinstance(value, torch.Tensor) or value.dim() != len(self.shape):
            return False
        return all(
            want is None or size == want
            for want, size in zip(self.shape, value.shape, strict=True)
        )

    def __str__(self) -> str:
        sizes = ", ".join("any" if size is None else str(size) for size in self.shape)
        return f"a tensor of shape ({sizes})"


@dataclass(frozen=True, slots=True, eq=False)
class RecordedConstant:
    """A constant among the arguments of a call.

    Attributes:
        value: Its value.
        kind: Its type, for 1 and True and 1.0 are equal.
    """

    value: object
    kind: type

    def fits(self, value: Any) -> bool:
        """Return whether ``value`` is the same constant."""
        want: Any = self.value
        if type(value) is not self.kind:
            return False
        if self.kind is float and want == 0:
            return bool(value == 0 and math.copysign(1.0, value) == math.copysign(1.0, want))
        return bool(value == want or (want != want and value != value))

    # As what fits: 0.0 and -0.0 are two constants, and a NaN is the same as another one.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, RecordedConstant) and self.fits(other.value)

    def __hash__(self) -> int:
        return hash((self.kind, repr(self.value)))

    def __str__(self) -> str:
        return repr(self.value)


def may_be_of_type(
    expected: torch.dtype, value: torch.Tensor, moved: Mapping[torch.dtype, torch.dtype]
) -> bool:
    """Return whether another type than the recorded one comes of a move, or of autocast.

    Args:
        expected: What was recorded.
        value: What is there.
        moved: What types became when the module that looks at it was moved.
    """
    found = value.dtype
    if not (expected.is_floating_point and found.is_floating_point):
        return False
    if moved.get(expected) is found:
        return True
    device = value.device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return False
    # It makes less of float32, and never more of what is less.
    return expected is torch.float32 and found is torch.get_autocast_dtype(device)


Recorded = RecordedTensor | RecordedConstant | None
"""What one leaf of the arguments was; None where it may be anything."""


_recorded_tensor = lru_cache(1024)(RecordedTensor)
"""Tensors of a program have few shapes."""


def _fixed(size: Any) -> int | None:
    """Return the number that export fixed a size to that was to vary; None if it varies."""
    return None if varies(size) else int(plain_number(size))


def recorded(value: Any) -> Recorded:
    """Return what is recorded of an example value or a constant."""
    if isinstance(value, torch.Tensor):
        shape = tuple([size if isinstance(size, int) else _fixed(size) for size in value.shape])
        return _recorded_tensor(shape, value.dtype)
    if value is None or type(value) in {bool, int, float, str}:
        return RecordedConstant(value, type(value))
    return None
