"""The values of a method during emission: tensors, run-time numbers and storages."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from math import prod
from typing import Any, TypeAlias

import torch

DimOrder: TypeAlias = tuple[int, ...]


class Role(Enum):
    """Purpose of the bytes of a storage."""

    ACTIVATION = "activation"
    CONSTANT = "constant"
    STATE = "state"
    INPUT = "input"
    CALLER = "caller"
    """Memory that the caller provides at run time: it is not planned, and nothing may alias it."""


_STATIC = frozenset({int})


@dataclass(eq=False, slots=True)
class Storage:
    """A block of bytes that one or more tensors share.

    Attributes:
        nbytes: Size in bytes, the upper bound where shapes vary.
        role: Purpose of the bytes.
        name: Name of the first tensor in it, for messages and reports.
        memory_id: Id of the planned memory that contains it, from 1; 0 before planning.
        offset: Offset in bytes in that memory.
    """

    nbytes: int
    role: Role
    name: str
    memory_id: int = 0
    offset: int = 0


@dataclass(eq=False, slots=True)
class TensorValue:
    """A tensor of the program.

    Attributes:
        name: Name of its graph node.
        shape: Size of each dimension; a ``torch.SymInt`` where it varies.
        sizes: Upper bound of each dimension.
        dim_order: Dimensions from the outermost in memory to the innermost.
        constant: Value of a constant, otherwise None.
        key: Fully qualified name of a parameter or buffer, "" for others.
        state: Whether this is a buffer that the program mutates.
        fixed_role: Required role of the storage, None for an activation.
        grows: Whether a loop fills it row by row, so that its size along dimension 0 grows in the
            loop.
        base: The tensor whose memory this one shares, None when it has its own.
        base_offset: Offset in bytes into the memory of ``base``.
        storage: Its memory, set by linearization.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[Any, ...]
    sizes: tuple[int, ...]
    dim_order: DimOrder
    constant: torch.Tensor | None = None
    key: str = ""
    state: bool = False
    fixed_role: Role | None = None
    grows: bool = False
    base: TensorValue | None = None
    base_offset: int = 0
    storage: Storage | None = field(default=None, repr=False)

    @property
    def dynamic(self) -> bool:
        """Return whether any dimension varies at run time."""
        return not _STATIC.issuperset(map(type, self.shape))

    @property
    def rank(self) -> int:
        """Return the number of dimensions."""
        return len(self.sizes)

    @property
    def nbytes(self) -> int:
        """Return the size in bytes at the upper bound of the shape."""
        return prod(self.sizes) * self.dtype.itemsize

    @property
    def contiguous(self) -> bool:
        """Return whether the dim order is the contiguous one."""
        return self.dim_order == tuple(range(len(self.sizes)))

    def like(self, name: str, dim_order: DimOrder | None = None) -> TensorValue:
        """Return a new activation of the same type and shape.

        Args:
            dim_order: The dimension order; that of this tensor when None.
        """
        order = self.dim_order if dim_order is None else dim_order
        return TensorValue(name, self.dtype, self.shape, self.sizes, order)


@dataclass(eq=False, slots=True)
class ScalarValue:
    """A number that the program computes at run time.

    Attributes:
        name: Name of the graph node that makes it.
        kind: ``int``, ``bool`` or ``float``.
        initial: Value of its entry in the value table before the program runs.
    """

    name: str
    kind: type
    initial: int | bool | float = 0


Value: TypeAlias = TensorValue | ScalarValue
"""Operand or result of an operation; literal arguments are plain Python data."""


def contiguous_order(rank: int) -> DimOrder:
    """Return the dimension order of a contiguous tensor."""
    return tuple(range(rank))


def channels_last_order(rank: int) -> DimOrder:
    """Return the dimension order of a channels-last tensor of rank 4 or 5."""
    return (0, *range(2, rank), 1)


def root_of(value: TensorValue) -> tuple[TensorValue, int]:
    """Return the tensor whose memory ``value`` shares, and the offset in bytes into it."""
    offset = 0
    while value.base is not None:
        offset += value.base_offset
        value = value.base
    return value, offset
