"""A payload's graph as the bytes that the runtime reads."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import cast

import flatbuffers

from lowerdeck.serializer import XnnDatatype
from lowerdeck.xnnpack.payload.encoding import Encoding
from lowerdeck.xnnpack.payload.schema import (
    Constant,
    Graph,
    Node,
    Value,
)

MAGIC = b"XH00"
IDENTIFIER = b"XN01"
HEADER_SIZE = 30
ALIGNMENT = 16
HEADER = struct.Struct("<4x4sHIIIQ")
"""Four zeros, the magic, header size, flatbuffer offset and size, constants offset and size."""
LAYOUT_MARK = " channels_last"
"""What comes in the version's text before the positions of arguments with channels last."""
_PLAIN, _QUANTISED = 1, 2
_PER_CHANNEL, _PER_TENSOR, _PER_TOKEN, _PER_GROUP = 1, 2, 3, 4
_TENSOR_TYPES = {XnnDatatype.QINT8, XnnDatatype.QUINT8, XnnDatatype.QINT32}
_CHANNEL_TYPES = {XnnDatatype.QCINT8, XnnDatatype.QCINT32, XnnDatatype.QCINT4}
NAMED = 0xFFFFFFFFFFFFFFFF
"""The offset of a constant that has a name instead."""


def encode(graph: Graph, constants: bytes = b"") -> bytes:
    """Return the payload: a header, the graph as a flatbuffer, and the constants inside the blob.

    Args:
        graph: The graph.
        constants: The bytes of constants that have no key in the named data.

    Returns:
        The blob of the delegate.
    """
    flat = _flatbuffer(graph)
    start = -(-HEADER_SIZE // ALIGNMENT) * ALIGNMENT
    padded = flat.ljust(-(-len(flat) // ALIGNMENT) * ALIGNMENT, b"\0")
    header = HEADER.pack(
        *(MAGIC, HEADER_SIZE, start, len(flat), start + len(padded), len(constants))
    )
    return b"".join([header.ljust(start, b"\0"), padded, constants])


def _flatbuffer(graph: Graph) -> bytes:
    builder = flatbuffers.Builder(1024 + 128 * (len(graph.values) + len(graph.nodes)))
    positions = "".join(f" {position}" for position in sorted(graph.channels_last))
    version = builder.CreateString(f"0{LAYOUT_MARK}{positions}" if positions else "0")
    nodes = _offsets(builder, [_node(builder, node) for node in graph.nodes])
    values = _offsets(builder, [_value(builder, value) for value in graph.values])
    constants = _offsets(builder, [_constant(builder, constant) for constant in graph.constants])
    inputs, outputs = _vector(builder, graph.input_ids), _vector(builder, graph.output_ids)
    builder.StartObject(9)
    builder.PrependUOffsetTRelativeSlot(0, version, 0)
    builder.PrependUOffsetTRelativeSlot(1, nodes, 0)
    builder.PrependUOffsetTRelativeSlot(2, values, 0)
    builder.PrependUint32Slot(3, graph.num_externs, 0)
    builder.PrependUOffsetTRelativeSlot(4, inputs, 0)
    builder.PrependUOffsetTRelativeSlot(5, outputs, 0)
    builder.PrependUOffsetTRelativeSlot(8, constants, 0)
    builder.Finish(builder.EndObject(), IDENTIFIER)
    return bytes(builder.Output())


def _node(builder: flatbuffers.Builder, node: Node) -> int:
    fields = node.kind.fields
    vectors = {
        name: _vector(builder, cast("tuple[int, ...]", node.fields[name]))
        for name, kind in fields
        if kind == "[u32]"
    }
    builder.StartObject(len(fields))
    for slot, (name, kind) in enumerate(fields):
        if kind == "[u32]":
            builder.PrependUOffsetTRelativeSlot(slot, vectors[name], 0)
        elif kind == "f32":
            builder.PrependFloat32Slot(slot, node.fields.get(name, 0.0), 0.0)
        else:
            builder.PrependUint32Slot(slot, node.fields.get(name, 0), 0)
    table = builder.EndObject()
    limits = 0
    if node.output_range is not None:
        builder.StartObject(2)
        builder.PrependFloat32Slot(0, node.output_range[0], 0.0)
        builder.PrependFloat32Slot(1, node.output_range[1], 0.0)
        limits = builder.EndObject()
    builder.StartObject(4)
    builder.PrependUint8Slot(0, int(node.kind), 0)
    builder.PrependUOffsetTRelativeSlot(1, table, 0)
    builder.PrependUint32Slot(2, node.debug_handle, 0)
    builder.PrependUOffsetTRelativeSlot(3, limits, 0)
    return int(builder.EndObject())


def _value(builder: flatbuffers.Builder, value: Value) -> int:
    dims = _vector(builder, value.dims)
    builder.StartObject(8)
    builder.PrependInt16Slot(0, int(value.encoding.datatype), 0)
    builder.PrependUint32Slot(1, len(value.dims), 0)
    builder.PrependUOffsetTRelativeSlot(2, dims, 0)
    builder.PrependUint32Slot(3, value.constant, 0)
    builder.PrependUint32Slot(4, value.external_id, 0)
    builder.PrependUint32Slot(5, value.flags, 0)
    builder.PrependUint32Slot(6, value.id, 0)
    table = builder.EndObject()
    kind, scales = _quantization(builder, value.encoding)
    if kind:
        builder.StartObject(3)
        builder.PrependUOffsetTRelativeSlot(0, table, 0)
        builder.PrependUint8Slot(1, kind, 0)
        builder.PrependUOffsetTRelativeSlot(2, scales, 0)
        table = builder.EndObject()
    builder.StartObject(2)
    builder.PrependUint8Slot(0, _QUANTISED if kind else _PLAIN, 0)
    builder.PrependUOffsetTRelativeSlot(1, table, 0)
    return int(builder.EndObject())


def _quantization(builder: flatbuffers.Builder, encoding: Encoding) -> tuple[int, int]:
    """Return the number of the table of scales in its union, 0 for floats, and the table."""
    datatype = encoding.datatype
    if datatype in _TENSOR_TYPES:
        builder.StartObject(2)
        builder.PrependFloat32Slot(0, encoding.scale, 0.0)
        builder.PrependInt32Slot(1, encoding.zero_point, 0)
        return _PER_TENSOR, int(builder.EndObject())
    if datatype in _CHANNEL_TYPES:
        builder.StartObject(4)
        builder.PrependInt32Slot(1, encoding.channel_dim, 0)
        builder.PrependUint32Slot(2, encoding.scales, 0)
        builder.PrependUint32Slot(3, encoding.count, 0)
        return _PER_CHANNEL, int(builder.EndObject())
    if datatype is XnnDatatype.QDINT8:
        builder.StartObject(1)
        builder.PrependInt32Slot(0, encoding.nonbatch_dims, 0)
        return _PER_TOKEN, int(builder.EndObject())
    if datatype is XnnDatatype.QBINT4:
        builder.StartObject(6)
        builder.PrependInt32Slot(1, encoding.channel_dim, 0)
        builder.PrependInt32Slot(2, encoding.group_size, 0)
        builder.PrependUint32Slot(4, encoding.scales, 0)
        builder.PrependUint32Slot(5, encoding.count, 0)
        return _PER_GROUP, int(builder.EndObject())
    return 0, 0


def _constant(builder: flatbuffers.Builder, constant: Constant) -> int:
    # The runtime asks whether a key is there, not whether it is empty: leave it out where unused.
    key = builder.CreateString(constant.key) if constant.key else 0
    builder.StartObject(3)
    builder.PrependUint64Slot(0, NAMED if constant.key else constant.offset, 0)
    builder.PrependUint64Slot(1, constant.size, 0)
    builder.PrependUOffsetTRelativeSlot(2, key, 0)
    return int(builder.EndObject())


def _vector(builder: flatbuffers.Builder, numbers: Iterable[int]) -> int:
    return _prepended(builder, list(numbers), builder.PrependUint32)


def _offsets(builder: flatbuffers.Builder, offsets: list[int]) -> int:
    return _prepended(builder, offsets, builder.PrependUOffsetTRelative)


def _prepended(
    builder: flatbuffers.Builder, items: list[int], prepend: Callable[[int], None]
) -> int:
    builder.StartVector(4, len(items), 4)
    for item in reversed(items):  # a flatbuffer grows from its end
        prepend(item)
    return int(builder.EndVector())
