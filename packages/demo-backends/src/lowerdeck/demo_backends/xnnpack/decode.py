"""A payload's bytes as a graph: every offset is checked before it is followed."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TypeVar

from lowerdeck.demo_backends.errors import BlobError
from lowerdeck.demo_backends.xnnpack.encode import HEADER, IDENTIFIER, LAYOUT_MARK, MAGIC
from lowerdeck.demo_backends.xnnpack.schema import (
    FLOAT32,
    LAYOUTS,
    MAX_EXTERNALS,
    MAX_RANK,
    NONE,
    Constant,
    FieldType,
    Graph,
    Node,
    NodeKind,
    Value,
)

T = TypeVar("T")

_PLAIN, _QUANTISED = 1, 2
"""The kinds of values: without and with a scale."""

_DATATYPES = {
    1: "float32",
    2: "float16",
    3: "qint8",
    4: "quint8",
    5: "qint32",
    6: "qcint8",
    7: "qcint32",
    8: "qcint4",
    9: "qdint8",
    10: "qbint4",
    11: "qpint8",
    12: "int32",
    13: "pfp32",
    14: "bfloat16",
}
"""The names of XNNPACK's datatypes by their numbers in a payload."""


def decode(blob: memoryview | bytes) -> tuple[Graph, memoryview]:
    """Return a payload's graph, and its constants that lie inside the blob.

    Args:
        blob: The blob of a delegate of ``XnnpackBackend``, ours or another compiler's.

    Returns:
        The graph, with all references between its parts checked, and a view of the constant
        segment.

    Raises:
        BlobError: The blob is truncated, damaged or uses what this reader does not know.
    """
    view = memoryview(blob).cast("B")
    if len(view) < HEADER.size:
        raise BlobError(f"a payload has at least {HEADER.size} bytes, found {len(view)}")
    magic, _, start, size, constants, constants_size = HEADER.unpack_from(view)
    if magic != MAGIC:
        raise BlobError(
            f"bytes 4 to 8 of a payload are {MAGIC!r}, found {magic!r}: is this a blob of "
            "XnnpackBackend, and of a version with that header?"
        )
    if start + size > len(view) or size < 8:
        raise BlobError(
            f"the graph should lie at {start} to {start + size}, the blob has {len(view)} bytes: "
            "it was truncated"
        )
    if constants < start + size or constants + constants_size > len(view):
        raise BlobError(
            f"the constants should lie at {constants} to {constants + constants_size}, behind the "
            f"graph, which ends at {start + size}, and inside the {len(view)} bytes of the blob"
        )
    flat = _Flat(view[start : start + size])
    if bytes(flat.data[4:8]) != IDENTIFIER:
        raise BlobError(
            f"the graph is of version {bytes(flat.data[4:8])!r}, this reader knows {IDENTIFIER!r}"
        )
    return _graph(flat), view[constants : constants + constants_size]


class _Flat:
    """Reads numbers of a flatbuffer, and complains where they lie outside it."""

    def __init__(self, data: memoryview) -> None:
        self.data = data

    def number(self, kind: str, at: int) -> int:
        try:
            return int(struct.unpack_from(f"<{kind}", self.data, self._at(at))[0])
        except struct.error as error:
            raise BlobError(f"offset {at} lies outside the graph: {error}") from error

    def real(self, at: int) -> float:
        return float(struct.unpack("<f", struct.pack("<I", self.number("I", at)))[0])

    def follow(self, at: int) -> int:
        return at + self.number("I", at)

    def field(self, table: int, slot: int) -> int:
        """Return where a field lies, or 0 where the table leaves it out."""
        vtable = table - self.number("i", table)
        if 4 + 2 * slot >= self.number("H", vtable):
            return 0
        offset = self.number("H", vtable + 4 + 2 * slot)
        return table + offset if offset else 0

    def get(self, table: int, slot: int, kind: str = "I") -> int:
        at = self.field(table, slot)
        return self.number(kind, at) if at else 0

    def get_real(self, table: int, slot: int) -> float:
        at = self.field(table, slot)
        return self.real(at) if at else 0.0

    def table(self, table: int, slot: int, what: str) -> int:
        at = self.field(table, slot)
        if not at:
            raise BlobError(f"{what} is missing in the table at {table}")
        return self.follow(at)

    def numbers(self, table: int, slot: int) -> tuple[int, ...]:
        start, count = self._vector(table, slot)
        return struct.unpack_from(f"<{count}I", self.data, start)

    def tables(self, table: int, slot: int, read: Callable[[int], T]) -> list[T]:
        start, count = self._vector(table, slot)
        return [read(self.follow(start + 4 * position)) for position in range(count)]

    def text(self, table: int, slot: int) -> str:
        start, count = self._vector(table, slot, width=1)
        try:
            return bytes(self.data[start : start + count]).decode()
        except UnicodeDecodeError as error:
            raise BlobError(f"the text at {start} is not UTF-8: {error}") from error

    def _vector(self, table: int, slot: int, width: int = 4) -> tuple[int, int]:
        at = self.field(table, slot)
        if not at:
            return 0, 0
        start = self.follow(at)
        count = self.number("I", start)
        if start + 4 + width * count > len(self.data):
            raise BlobError(f"a list of {count} items at {start} leaves the graph: truncated?")
        return start + 4, count

    def _at(self, at: int) -> int:
        if at < 0:
            raise BlobError(f"offset {at} lies before the graph")
        return at


def _graph(flat: _Flat) -> Graph:
    root = flat.follow(0)
    constants = flat.tables(root, 8, lambda table: _constant(flat, table))
    values = flat.tables(root, 2, lambda table: _value(flat, table, len(constants)))
    graph = Graph(
        values=values,
        nodes=flat.tables(root, 1, lambda table: _node(flat, table)),
        constants=constants,
        input_ids=list(flat.numbers(root, 4)),
        output_ids=list(flat.numbers(root, 5)),
        num_externs=flat.get(root, 3),
        channels_last=_channels_last(flat.text(root, 0)),
    )
    if graph.num_externs > MAX_EXTERNALS:
        raise BlobError(f"at most {MAX_EXTERNALS} arguments are allowed: {graph.num_externs}")
    known = {value.id for value in values}
    if len(known) != len(values):
        raise BlobError("two values of the graph have one id")
    for value in values:
        if value.flags not in (0, 1, 2):
            raise BlobError(f"value {value.id} has the unknown flags {value.flags}")
        if value.flags and value.external_id >= graph.num_externs:
            raise BlobError(
                f"value {value.id} is argument {value.external_id} of {graph.num_externs}"
            )
    for node in graph.nodes:
        for name, number in node.fields.items():
            if name.endswith("_id") and number != NONE and number not in known:
                raise BlobError(f"{node.kind.name}.{name} is value {number}, which is not there")
    return graph


def _channels_last(version: str) -> set[int]:
    _, mark, positions = version.partition(LAYOUT_MARK)
    words = positions.split(" ")[1:] if mark else []
    if not all(word.isascii() and word.isdigit() and len(word) < 6 for word in words):
        raise BlobError(f"the version's text {version[:60]!r} does not list positions")
    return {int(word) for word in words}


def _constant(flat: _Flat, table: int) -> Constant:
    return Constant(
        key=flat.text(table, 2), size=flat.get(table, 1, "Q"), offset=flat.get(table, 0, "Q")
    )


def _value(flat: _Flat, table: int, constants: int) -> Value:
    union, at = flat.get(table, 0, "B"), flat.table(table, 1, "a value's table")
    if union == _QUANTISED:
        # Its first field is the table that plain values have; the others are scales.
        at = flat.table(at, 0, "a quantised value's table")
    dtype = flat.get(at, 0, "h")
    if union not in (_PLAIN, _QUANTISED):
        raise BlobError(f"a value is of the unknown kind {union}")
    if union != _PLAIN or dtype != FLOAT32 or flat.get(at, 7, "h"):
        name = _DATATYPES.get(dtype, f"datatype {dtype}")
        raise BlobError(
            f"value {flat.get(at, 6)} is {'quantised ' * (union == _QUANTISED)}{name}, which this "
            "runtime does not compute: it is a reference for float32 graphs. Run the file in the "
            "official runtime"
        )
    value = Value(
        id=flat.get(at, 6),
        dims=flat.numbers(at, 2),
        constant=flat.get(at, 3),
        external_id=flat.get(at, 4),
        flags=flat.get(at, 5),
    )
    if len(value.dims) > MAX_RANK:
        raise BlobError(f"value {value.id} has {len(value.dims)} dimensions, at most {MAX_RANK}")
    if value.constant >= max(constants, 1):
        raise BlobError(f"value {value.id} is constant {value.constant} of {constants}")
    return value


def _node(flat: _Flat, table: int) -> Node:
    number, at = flat.get(table, 0, "B"), flat.table(table, 1, "a node's table")
    if number not in NodeKind._value2member_map_:
        raise BlobError(f"a node is of the unknown kind {number}")
    kind = NodeKind(number)
    fields: dict[str, int | float | tuple[int, ...]] = {}
    for slot, (name, stored) in enumerate(LAYOUTS[kind]):
        if stored is FieldType.U32_VECTOR:
            fields[name] = flat.numbers(at, slot)
        elif stored is FieldType.F32:
            fields[name] = flat.get_real(at, slot)
        else:
            fields[name] = flat.get(at, slot)
    limits = flat.field(table, 3)
    output_range = None
    if limits:
        limits = flat.follow(limits)
        output_range = (flat.get_real(limits, 0), flat.get_real(limits, 1))
    return Node(kind, fields, output_range, flat.get(table, 2))
