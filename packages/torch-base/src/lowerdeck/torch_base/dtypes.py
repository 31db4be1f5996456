"""Numeric codes of dtypes and memory formats, which torch defines only in C++.

These are ``c10::ScalarType`` and ``c10::MemoryFormat``, without sub-byte and quantized dtypes
(``bits8``, ``uint4``, ``quint8``).
"""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType
from typing import Any

import torch

from lowerdeck.torch_base._torch_private import expression_of, hint_of

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

    Tensors with one channel or one pixel are contiguous in both formats and count as the default
    format, which more kernels support.

    Args:
        tensor: A real or fake tensor.
    """
    memory_format = _BY_RANK.get(tensor.dim())
    if memory_format is None:
        return False
    if not any(type(one) is int and one == 1 for one in (tensor.shape[1], tensor.stride(1))):
        return False
    # torch solves symbolic strides (15 ms), but most are written as products of sizes.
    if any(isinstance(size, torch.SymInt) for size in tensor.shape):
        last = range(tensor.dim() - 1, 1, -1)
        if _is_packed(tensor, (*last, 1, 0)):
            return False
        has_pixels = any(hint_of(size) not in (None, 1) for size in tensor.shape[2:])
        if has_pixels and _is_packed(tensor, (1, *last, 0)):
            return True
    try:
        return not tensor.is_contiguous() and tensor.is_contiguous(memory_format=memory_format)
    except RuntimeError:
        # Depends on unbacked sizes.
        return False


def _is_packed(tensor: torch.Tensor, order: Iterable[int]) -> bool:
    """Return whether strides are the products of sizes in an order, the innermost first."""
    expected: Any = 1
    for dim in order:
        size, stride = tensor.shape[dim], tensor.stride(dim)
        if not (type(size) is int and size == 1):
            if expression_of(stride) != expected:
                return False
            expected = expected * expression_of(size)
    return True
