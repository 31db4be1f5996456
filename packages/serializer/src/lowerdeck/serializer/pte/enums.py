"""The enumerations of the `.pte` schema, with the stored numbers."""

from __future__ import annotations

from enum import IntEnum

_ITEM_SIZES = (
    *(1, 1, 2, 4, 8, 2, 4, 8),
    *(4, 8, 16, 1, 1, 1, 4, 2),
    *(1, 1, 1, 1, 1, 1, 2),
    *(1, 1, 1, 1, 2, 4, 8),
)


class ScalarType(IntEnum):
    """Element type of a tensor.

    The numbers are those of PyTorch's ``c10::ScalarType``. The complex types and the ``BITS``
    types of less than 16 bits are missing from the published schema, but the runtime accepts them.
    """

    BYTE = 0
    CHAR = 1
    SHORT = 2
    INT = 3
    LONG = 4
    HALF = 5
    FLOAT = 6
    DOUBLE = 7
    COMPLEX_HALF = 8
    COMPLEX_FLOAT = 9
    COMPLEX_DOUBLE = 10
    BOOL = 11
    QINT8 = 12
    QUINT8 = 13
    QINT32 = 14
    BFLOAT16 = 15
    QUINT4X2 = 16
    QUINT2X4 = 17
    BITS1X8 = 18
    BITS2X4 = 19
    BITS4X2 = 20
    BITS8 = 21
    BITS16 = 22
    FLOAT8E5M2 = 23
    FLOAT8E4M3FN = 24
    FLOAT8E5M2FNUZ = 25
    FLOAT8E4M3FNUZ = 26
    UINT16 = 27
    UINT32 = 28
    UINT64 = 29

    @property
    def itemsize(self) -> int:
        """Return the size of one element in bytes."""
        return _ITEM_SIZES[self]


class TensorShapeDynamism(IntEnum):
    """How the shape of a tensor may change at run time.

    ``STATIC``: not at all. ``DYNAMIC_BOUND``: ``sizes`` are upper bounds.
    ``DYNAMIC_UNBOUND``: no bound is known; the runtime rejects it.
    """

    STATIC = 0
    DYNAMIC_BOUND = 1
    DYNAMIC_UNBOUND = 2


class TensorDataLocation(IntEnum):
    """Source of the bytes of a tensor: a segment of this file, or a `.ptd` file."""

    SEGMENT = 0
    EXTERNAL = 1


class DataLocation(IntEnum):
    """Location of a delegate's bytes: inline in the FlatBuffer, or in a segment."""

    INLINE = 0
    SEGMENT = 1


class DeviceType(IntEnum):
    """Type of the device that holds a buffer or tensor."""

    CPU = 0
    CUDA = 1
