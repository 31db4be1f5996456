"""Dtypes and memory formats by their numbers in a program, which torch says in C++ alone.

Whoever writes a program and whoever reads it must mean the same by one. It is that of
``c10::ScalarType`` for a dtype, and of ``c10::MemoryFormat`` for a memory format. Types
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

MEMORY_FORMATS = MappingProxyType(
    {
        0: torch.contiguous_format,
        1: torch.preserve_format,
        2: torch.channels_last,
        3: torch.channels_last_3d,
    }
)
"""The memory format of each number (``c10::MemoryFormat``) that programs keep as arguments."""

_BY_RANK = {4: torch.channels_last, 5: torch.channels_last_3d}


def lies_channels_last(tensor: torch.Tensor) -> bool:
    """Tell whether a program holds a tensor with its channels last: only where nothing else fits.

    A tensor of one channel, or one pixel, lies both ways. Whoever compiles a part of a program and
    whoever writes the rest must call it the same, and plain is what more kernels take.

    Args:
        tensor: A tensor, or what stands for it in a graph.
    """
    wanted = _BY_RANK.get(tensor.dim())
    if wanted is None:
        return False
    try:
        return not tensor.is_contiguous() and tensor.is_contiguous(memory_format=wanted)
    except RuntimeError:
        # Sizes that are read from data decide it, so nothing is known before the program runs.
        return False
