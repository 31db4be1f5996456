"""Numbers of dtypes and memory formats in a program, which torch defines in C++ only.

They are those of ``c10::ScalarType`` and ``c10::MemoryFormat``. Types whose elements share bytes
or need a scale (``bits8``, ``uint4``, ``quint8``) are left out: a tensor in a program is an
array of numbers.
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


def is_channels_last(tensor: torch.Tensor) -> bool:
    """Return whether a program stores a tensor with its channels last.

    A tensor of one channel, or one pixel, is contiguous in both formats. The compiler of a
    partition and the emitter of the rest must agree, and more kernels take the default format.

    Args:
        tensor: A tensor, real or fake.
    """
    memory_format = _BY_RANK.get(tensor.dim())
    if memory_format is None:
        return False
    try:
        return not tensor.is_contiguous() and tensor.is_contiguous(memory_format=memory_format)
    except RuntimeError:
        # It depends on sizes that are read from data.
        return False
