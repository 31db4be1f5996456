"""The operators inside a blob of XNNPACK, the one backend that the official wheel carries."""

from __future__ import annotations

import struct
from collections import Counter

_NAMES = (
    "",
    *("Add", "FullyConnected", "Softmax", "Sigmoid", "StaticTranspose", "Clamp", "Conv2d", "Div"),
    *("StaticResizeBilinear2D", "StaticConstantPad", "AvgPooling2d", "Minimum"),
    *("DepthwiseConv2d", "MaxPooling2d", "Multiply", "Subtract", "Floor", "Convert"),
    *("GlobalAvgPooling2d", "StaticReshape", "ArgMaxPooling2d", "SquareRoot", "Ceiling"),
    *("Hardswish", "LeakyReLU", "Maximum", "Negate", "Square", "ELU", "Abs", "PReLU"),
    *("Concatenate2", "Concatenate3", "Concatenate4", "StaticSlice"),
    *("ScaledDotProductAttention", "BatchMatrixMultiply", "Concatenate5", "ConvTranspose2d"),
    *("ReciprocalSquareRoot", "Log", "Gelu", "Tanh", "Exp", "Sin", "Copy", "Cos"),
)
_MOST_NODES = 1_000_000
_NODES_FIELD = 1


def xnnpack_nodes(blob: memoryview) -> list[list[str | int]]:
    """Return the operators of an XNNPACK graph and how often each stands in it.

    Args:
        blob: The bytes of a delegate of any backend.

    Returns:
        Pairs of name and count, most frequent first; nothing if the blob is not XNNPACK's or
        is broken, for a picture must not fail on a blob.
    """
    if blob.nbytes < 32 or blob[4:8].tobytes() != b"XH00":
        return []
    try:
        (start,) = struct.unpack_from("<I", blob, 10)
        return _count(blob, start)
    except (struct.error, IndexError):
        return []


def _count(blob: memoryview, start: int) -> list[list[str | int]]:
    nodes = _field(blob, start + _u32(blob, start), _NODES_FIELD)
    if nodes is None:
        return []
    vector = nodes + _u32(blob, nodes)
    length = min(_u32(blob, vector), _MOST_NODES)
    counts: Counter[str] = Counter()
    for item in range(vector + 4, vector + 4 + 4 * length, 4):
        kind_at = _field(blob, item + _u32(blob, item), 0)
        kind = blob[kind_at] if kind_at is not None else 0
        counts[_NAMES[kind] if 0 < kind < len(_NAMES) else f"kind {kind}"] += 1
    return [[name, count] for name, count in counts.most_common()]


def _field(blob: memoryview, table: int, field: int) -> int | None:
    """Return where a field of a FlatBuffers table stands, None if it is absent."""
    (back,) = struct.unpack_from("<i", blob, table)
    vtable = table - back
    if vtable < 0:
        return None
    (length,) = struct.unpack_from("<H", blob, vtable)
    if 4 + 2 * field >= length:
        return None
    (offset,) = struct.unpack_from("<H", blob, vtable + 4 + 2 * field)
    return table + offset if offset else None


def _u32(blob: memoryview, position: int) -> int:
    (value,) = struct.unpack_from("<I", blob, position)
    return int(value)
