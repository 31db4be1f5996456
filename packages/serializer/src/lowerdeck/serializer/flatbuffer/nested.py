"""Nested dictionaries as a FlatBuffer, which grows from its end: children come before parents.

FlatBuffers' own builder writes each field by a call or two; here a table is packed at once, and
its layout is computed once for all tables with the same fields.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lowerdeck.serializer.flatbuffer.alignment import round_up
from lowerdeck.serializer.flatbuffer.wire import SCALAR_CODES, Field

_ALIGNMENT = 16
# After the 4 bytes that lead to the vtable: what needs no gap, then 8 bytes wide, then the small.
_ORDER = {4: 0, 8: 1, 2: 2, 1: 3}


class _Layout(NamedTuple):
    """How the tables of one name with the same fields are packed."""

    table: struct.Struct
    order: list[int]
    offsets: list[tuple[int, int]]
    alignment: int
    vtable: bytes


class NestedWriter:
    """Writes FlatBuffers of one schema."""

    def __init__(self, tables: Mapping[str, tuple[Field, ...]]) -> None:
        """Make a writer.

        Args:
            tables: Fields of each table by its name.
        """
        self.tables = tables
        self.names: dict[str, list[str]] = {
            name: [field.name for field in fields] for name, fields in tables.items()
        }
        self.kinds: dict[str, list[tuple[int, str]]] = {
            name: [(at, field.kind) for at, field in enumerate(fields) if field.is_offset]
            for name, fields in tables.items()
        }
        self._layouts: dict[tuple[str, tuple[bool, ...]], _Layout] = {}

    def write(self, root: str, values: Mapping[str, Any], identifier: bytes) -> bytes:
        """Return the bytes of a FlatBuffer.

        Args:
            root: Name of the outermost table.
            values: Its fields by name: numbers, text, sequences, dictionaries for tables, and
                pairs of a table's name and a dictionary for unions. None and 0 are left out.
            identifier: Four bytes that say what the buffer is.
        """
        buffer = _Buffer(self)
        table = buffer.table(root, values)
        start = buffer.start(8, _ALIGNMENT)
        buffer.add(struct.pack("<I4s", start - table, identifier), _ALIGNMENT)
        return b"".join(reversed(buffer.pieces))

    def layout(self, name: str, present: tuple[bool, ...]) -> _Layout:
        """Return the layout of tables of a name of whose fields these are present."""
        found = self._layouts.get((name, present))
        if found is None:
            found = self._layouts[name, present] = _lay_out(self.tables[name], present)
        return found


class _Buffer:
    """The bytes of a FlatBuffer, the last ones first.

    A *reference* is how many bytes before the end something begins; 0 is none.
    """

    def __init__(self, writer: NestedWriter) -> None:
        self._writer = writer
        self.pieces: list[bytes] = []
        self._size = 0
        self._vtables: dict[bytes, int] = {}

    def table(self, name: str, values: Mapping[str, Any]) -> int:
        """Add a table and return a reference to it."""
        found: list[Any] = [values.get(field, 0) for field in self._writer.names[name]]
        for at, kind in self._writer.kinds[name]:
            found[at] = self._object(kind, found[at])
        layout = self._writer.layout(name, tuple(map(bool, found)))
        vtable = self._vtables.get(layout.vtable)
        if vtable is None:
            vtable = self._vtables[layout.vtable] = self.add(layout.vtable, 4)
        start = self.start(layout.table.size, layout.alignment)
        for at, offset in layout.offsets:
            found[at] = start - offset - found[at]
        packed = layout.table.pack(vtable - start, *[found[at] for at in layout.order])
        return self.add(packed, layout.alignment)

    def _object(self, kind: str, value: Any) -> int:
        """Add what an offset leads to and return a reference to it."""
        if value is None or value == 0:
            return 0
        if kind == "union":
            return self.table(*value)
        if kind == "str":
            raw = value.encode()
            return self.add(struct.pack(f"<I{len(raw) // 4 * 4 + 4}s", len(raw), raw), 4)
        if not kind.startswith("["):
            return self.table(kind, value)
        item = kind[1:-1]
        if item in SCALAR_CODES:
            return self._vector(SCALAR_CODES[item], value)
        tables = [self.table(item, one) for one in value]
        first = self.start(4 + 4 * len(tables), 4) - 4
        return self._vector("I", [first - 4 * at - one for at, one in enumerate(tables)])

    def _vector(self, code: str, numbers: Sequence[float]) -> int:
        return self.add(struct.pack(f"<I{len(numbers)}{code}", len(numbers), *numbers), 4)

    def start(self, size: int, alignment: int) -> int:
        """Return the reference to something of ``size`` bytes that is added next."""
        return round_up(self._size + size, alignment)

    def add(self, piece: bytes, alignment: int) -> int:
        """Add bytes and return a reference to them."""
        start = self.start(len(piece), alignment)
        gap = start - self._size - len(piece)
        self.pieces += [b"\0" * gap, piece] if gap else [piece]
        self._size = start
        return start


def _lay_out(fields: Sequence[Field], present: Sequence[bool]) -> _Layout:
    order = [at for at, is_present in enumerate(present) if is_present]
    order.sort(key=lambda at: _ORDER[fields[at].size])
    entries = [0] * (max(order, default=-1) + 1)
    codes, end = "<i", 4
    for at in order:
        size = fields[at].size
        gap = -end % size
        codes += "x" * gap + fields[at].code
        entries[at] = end + gap
        end += gap + size
    table = struct.Struct(codes + "x" * (-end % 4))
    vtable = struct.pack(f"<{2 + len(entries)}H", 4 + 2 * len(entries), table.size, *entries)
    return _Layout(
        table,
        order,
        [(at, entries[at]) for at in order if fields[at].is_offset],
        8 if any(fields[at].size == 8 for at in order) else 4,
        vtable.ljust(round_up(len(vtable), 4), b"\0"),
    )
