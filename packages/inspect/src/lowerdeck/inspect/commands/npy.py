"""Header of NumPy's ``.npy`` files, to write arrays without NumPy.

Source: NumPy Enhancement Proposal 1, "A Simple File Format for NumPy Arrays", version 1.0.
"""

from __future__ import annotations

import struct

from lowerdeck import serializer as schema
from lowerdeck.serializer import ScalarType

_DESCRIPTIONS = {
    ScalarType.BYTE: "|u1",
    ScalarType.CHAR: "|i1",
    ScalarType.SHORT: "<i2",
    ScalarType.INT: "<i4",
    ScalarType.LONG: "<i8",
    ScalarType.HALF: "<f2",
    ScalarType.FLOAT: "<f4",
    ScalarType.DOUBLE: "<f8",
    ScalarType.COMPLEX_FLOAT: "<c8",
    ScalarType.COMPLEX_DOUBLE: "<c16",
    ScalarType.BOOL: "|b1",
    ScalarType.UINT16: "<u2",
    ScalarType.UINT32: "<u4",
    ScalarType.UINT64: "<u8",
}
_MAGIC = b"\x93NUMPY\x01\x00"
_ALIGNMENT = 64


def npy_header(tensor: schema.Tensor) -> bytes | None:
    """Return the ``.npy`` header for a tensor.

    Args:
        tensor: The tensor; its data follow the header unchanged.

    Returns:
        The header, or None if the format does not support the tensor: a type that NumPy lacks, or
        a layout that is not contiguous.
    """
    description = _DESCRIPTIONS.get(tensor.scalar_type)
    if description is None or list(tensor.dim_order) != list(range(len(tensor.sizes))):
        return None
    shape = f"({', '.join(map(str, tensor.sizes))}{',' if len(tensor.sizes) == 1 else ''})"
    text = f"{{'descr': '{description}', 'fortran_order': False, 'shape': {shape}, }}"
    used = len(_MAGIC) + 2 + len(text) + 1
    padded = text + " " * (-used % _ALIGNMENT) + "\n"
    return _MAGIC + struct.pack("<H", len(padded)) + padded.encode("ascii")
