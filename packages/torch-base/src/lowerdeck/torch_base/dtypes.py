"""Numeric codes of dtypes and memory formats, which torch defines only in C++.

These are ``c10::ScalarType`` and ``c10::MemoryFormat``, without sub-byte and quantized dtypes
(``bits8``, ``uint4``, ``quint8``).
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
"""Dtype by ``c10::ScalarType`` code."""

SCALAR_TYPES = MappingProxyType({dtype: number for number, dtype in DTYPES.items()})
"""``c10::ScalarType`` code by dtype."""

MEMORY_FORMATS = MappingProxyType(
    {
        0: torch.contiguous_format,
        1: torch.preserve_format,
        2: torch.channels_last,
        3: torch.channels_last_3d,
    }
)
"""Memory format by ``c10::MemoryFormat`` code."""

_BY_RANK = {4: torch.channels_last, 5: torch.channels_last_3d}


def is_channels_last(tensor: torch.Tensor) -> bool:
    """Return whether a program stores a tensor in channels-last format.

    Tensors with one channel or one pixel are contiguous in both formats and count as default,
    which more kernels support. Backends and the emitter must agree on this.

    Args:
        tensor: A real or fake tensor.
    """
    memory_format = _BY_RANK.get(tensor.dim())
    if memory_format is None:
        return False
    if not any(type(one) is int and one == 1 for one in (tensor.shape[1], tensor.stride(1))):
        # To compare its symbolic strides is slow.
        return False
    try:
        return not tensor.is_contiguous() and tensor.is_contiguous(memory_format=memory_format)
    except RuntimeError:
        # Depends on unbacked sizes.
        return False
