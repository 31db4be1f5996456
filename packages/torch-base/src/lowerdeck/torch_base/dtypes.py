"""The numbers of torch's dtypes, which torch says in C++ (``c10::ScalarType``) but not in Python.

Programs keep these numbers, so whoever writes one and whoever reads one must mean the same. Types
whose elements share bytes or need a scale beside them (``bits8``, ``uint4``, ``quint8``) are left
out: a tensor in a program is a row of numbers.
"""

from __future__ import annotations

from types import MappingProxyType

import torch

DTYPES = MappingProxyType(
    {
        0: torch.uint8,
        1: torch.int8,
        2: torch.int16,
        3: torch.int32,
        4: torch.int64,
        5: torch.float16,
        6: torch.float32,
        7: torch.float64,
        8: torch.complex32,
        9: torch.complex64,
        10: torch.complex128,
        11: torch.bool,
        15: torch.bfloat16,
        23: torch.float8_e5m2,
        24: torch.float8_e4m3fn,
        25: torch.float8_e5m2fnuz,
        26: torch.float8_e4m3fnuz,
        27: torch.uint16,
        28: torch.uint32,
        29: torch.uint64,
    }
)
"""The dtype of each number that an element type has in a program."""

SCALAR_TYPES = MappingProxyType({dtype: number for number, dtype in DTYPES.items()})
"""The number of each dtype that a program's tensor can have."""
