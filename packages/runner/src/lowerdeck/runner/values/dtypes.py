"""What the numbers of the file mean in torch: element types and memory formats."""

from __future__ import annotations

import torch

from lowerdeck.serializer import ScalarType

DTYPES: dict[int, torch.dtype] = {
    ScalarType.BYTE: torch.uint8,
    ScalarType.CHAR: torch.int8,
    ScalarType.SHORT: torch.int16,
    ScalarType.INT: torch.int32,
    ScalarType.LONG: torch.int64,
    ScalarType.HALF: torch.float16,
    ScalarType.FLOAT: torch.float32,
    ScalarType.DOUBLE: torch.float64,
    ScalarType.COMPLEX_FLOAT: torch.complex64,
    ScalarType.COMPLEX_DOUBLE: torch.complex128,
    ScalarType.BOOL: torch.bool,
    ScalarType.BFLOAT16: torch.bfloat16,
    ScalarType.FLOAT8E5M2: torch.float8_e5m2,
    ScalarType.FLOAT8E4M3FN: torch.float8_e4m3fn,
    ScalarType.FLOAT8E5M2FNUZ: torch.float8_e5m2fnuz,
    ScalarType.FLOAT8E4M3FNUZ: torch.float8_e4m3fnuz,
    ScalarType.UINT16: torch.uint16,
    ScalarType.UINT32: torch.uint32,
    ScalarType.UINT64: torch.uint64,
}

MEMORY_FORMATS: dict[int, torch.memory_format] = {
    0: torch.contiguous_format,
    1: torch.preserve_format,
    2: torch.channels_last,
    3: torch.channels_last_3d,
}
