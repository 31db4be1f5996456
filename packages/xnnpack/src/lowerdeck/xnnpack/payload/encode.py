"""A payload's graph as the bytes that the runtime reads."""

from __future__ import annotations

import struct
from functools import cache
from typing import Any

from lowerdeck.serializer import XnnDatatype
from lowerdeck.xnnpack.payload.encoding import Encoding
from lowerdeck.xnnpack.payload.flatbuffer import FlatBuffer
from lowerdeck.xnnpack.payload.schema import Constant, Graph, Node, NodeKind, Value

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
    made = FlatBuffer()
    positions = "".join(f" {position}" for position in sorted(graph.channels_last))
    root = made.table(
        "OOOIOOxxO",
        made.string(f"0{LAYOUT_MARK}{positions}" if positions else "0"),
        made.references([_node(made, node) for node in graph.nodes]),
        made.references([_value(made, value) for value in graph.values]),
        graph.num_externs,
        made.numbers(graph.input_ids),
        made.numbers(graph.output_ids),
        0,
        0,
        made.references([_constant(made, constant) for constant in graph.constants]),
    )
    return made.finish(root, IDENTIFIER)


def _node(made: FlatBuffer, node: Node) -> int:
    codes = _codes(node.kind)
    fields: list[Any] = [node.fields.get(name, 0) for name, _ in node.kind.fields]
    table = made.table(
        codes,
        *(
            made.numbers(field) if code == "O" else field
            for code, field in zip(codes, fields, strict=True)
        ),
    )
    limits = made.table("ff", *node.output_range) if node.output_range is not None else 0
    return made.table("BOIO", int(node.kind), table, node.debug_handle, limits)


@cache
def _codes(kind: NodeKind) -> str:
    return "".join({"[u32]": "O", "f32": "f"}.get(field, "I") for _, field in kind.fields)


def _value(made: FlatBuffer, value: Value) -> int:
    table = made.table(
        "hIOIIIIx",
        int(value.encoding.datatype),
        len(value.dims),
        made.numbers(value.dims),
        value.constant,
        value.external_id,
        value.flags,
        value.id,
        0,
    )
    kind, scales = _quantization(made, value.encoding)
    if kind:
        table = made.table("OBO", table, kind, scales)
    return made.table("BO", _QUANTISED if kind else _PLAIN, table)


def _quantization(made: FlatBuffer, encoding: Encoding) -> tuple[int, int]:
    """Return the number of the table of scales in its union, 0 for floats, and the table."""
    datatype = encoding.datatype
    if datatype in _TENSOR_TYPES:
        return _PER_TENSOR, made.table("fi", encoding.scale, encoding.zero_point)
    if datatype in _CHANNEL_TYPES:
        fields = encoding.channel_dim, encoding.scales, encoding.count
        return _PER_CHANNEL, made.table("xiII", 0, *fields)
    if datatype is XnnDatatype.QDINT8:
        return _PER_TOKEN, made.table("i", encoding.nonbatch_dims)
    if datatype is XnnDatatype.QBINT4:
        return _PER_GROUP, made.table(
            "xiixII",
            *(0, encoding.channel_dim, encoding.group_size),
            *(0, encoding.scales, encoding.count),
        )
    return 0, 0


def _constant(made: FlatBuffer, constant: Constant) -> int:
    # The runtime asks whether a key is there, not whether it is empty: leave it out where unused.
    key = made.string(constant.key) if constant.key else 0
    return made.table("QQO", NAMED if constant.key else constant.offset, constant.size, key)
