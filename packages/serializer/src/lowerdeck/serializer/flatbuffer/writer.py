"""Write FlatBuffers back to front, one column of equal tables at a time.

Offsets point forward only, so the target of an offset is written first, and stored behind it. All
tables of a kind are written together: each field is a column that is converted in one step, equal
rows are stored once, and one ``struct`` packs the distinct rows.

A *reference* is the distance of a table's start from the end of the buffer.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache
from itertools import chain, islice, starmap
from operator import attrgetter, index, sub
from typing import Any

from lowerdeck.serializer.errors import ProgramError
from lowerdeck.serializer.flatbuffer.alignment import round_up
from lowerdeck.serializer.flatbuffer.blobs import BlobIndex
from lowerdeck.serializer.flatbuffer.field_check import is_list
from lowerdeck.serializer.flatbuffer.limits import MAX_FLATBUFFER
from lowerdeck.serializer.flatbuffer.storage import byte_view
from lowerdeck.serializer.flatbuffer.stream import Piece
from lowerdeck.serializer.flatbuffer.wire import SCALAR_CODES, SCALAR_SIZES, Field, Format

UNWRITABLE = (AttributeError, LookupError, ArithmeticError, TypeError, ValueError, struct.error)
"""Exceptions for a value that does not fit its field; they do not name the object."""

_Row = tuple[Any, ...]
# Order by size: 4-byte fields need no padding after the 4-byte vtable offset, so they are first.
_ORDER = {4: 0, 8: 1, 2: 2, 1: 3}
# Floats are compared by their bits, because 0.0 == -0.0.
_BITS = {"f": "I", "d": "Q"}


class Writer:
    """Builder of one FlatBuffer, from its end to its start."""

    def __init__(self, form: Format, *, alignment: int = 16) -> None:
        """Create an empty FlatBuffer.

        Args:
            alignment: Alignment, from the start of the file, of the byte vectors that the format
                aligns.
        """
        self._form = form
        self._blob_alignment = max(alignment, 16)
        self._alignment = 16
        self._pieces: list[Piece] = []
        self._size = 0
        self._leaves: dict[bytes, int] = {}
        self._vectors: dict[_Row, int] = {}
        self._blobs: BlobIndex[int] = BlobIndex()

    def finish(
        self, name: str, root: object, identifier: bytes, *, inserted: int = 0
    ) -> list[Piece]:
        """Return the pieces of the FlatBuffer without copying blobs.

        Args:
            name: Name of the root table.
            root: An object of the table's class, or a dictionary if the table has none; the same
                holds for nested tables.
            identifier: File identifier of four bytes.
            inserted: Bytes to reserve after the identifier.

        Raises:
            ProgramError: The FlatBuffer exceeds ``MAX_FLATBUFFER``.
            Exception: A value does not fit its field; one of ``UNWRITABLE``.
        """
        (table,) = self._tables(name, [root])
        total = round_up(8 + inserted + self._size, self._alignment)
        head = struct.pack("<I4s", total - table, identifier)
        return [head.ljust(total - self._size, b"\0"), *reversed(self._pieces)]

    def _tables(self, name: str, items: Sequence[Any]) -> list[int]:
        """Write tables of one kind and return a reference to each."""
        if not items:
            return []
        fields = self._form.tables[name]
        kind = self._form.classes.get(name, dict)
        if {*map(type, items)} != {kind}:
            raise TypeError(f"expected only {name}")
        columns: dict[str, Sequence[Any]] = {}
        # The last field first: aligned bytes are late fields, so that their padding is at the end.
        for field in reversed(fields):
            if field.of in self._form.unions and not field.is_offset:
                continue  # written with the union
            if kind is dict:
                absent = None if field.is_offset else 0
                column = [item.get(field.name, absent) for item in items]
            else:
                column = list(map(attrgetter(field.name), items))
            if field.of in self._form.unions:
                columns[f"{field.name}_type"], columns[field.name] = self._union(field, column)
            elif field.is_offset:
                columns[field.name] = self._objects(name, field, column)
            else:
                columns[field.name] = self._numbers(field, column)
        rows = list(zip(*(columns[field.name] for field in fields), strict=True))
        rows = rows or [()] * len(items)
        new = list(dict.fromkeys(rows))
        offsets = [at for at, field in enumerate(fields) if field.is_offset]
        varying = [at for at in offsets if None in columns[fields[at].name]]
        if len(new) == len(rows) and not varying:
            return list(self._records(name, rows))
        groups: defaultdict[_Row, list[_Row]] = defaultdict(list)
        for row in new:
            groups[tuple([row[at] is None for at in varying])].append(row)
        references: dict[_Row, int] = {}
        for group in groups.values():
            references.update(zip(group, self._records(name, group), strict=True))
        return [references[row] for row in rows]

    def _numbers(self, field: Field, column: list[Any]) -> Sequence[Any]:
        if field.kind == "bool" and {*map(type, column)} != {bool}:
            raise TypeError("expected True or False")
        if field.of and not self._form.members(field.of).keys() >= {*map(index, column)}:
            raise ValueError(f"expected members of {field.of}")
        if field.code in _BITS:
            packed = struct.pack(f"<{len(column)}{field.code}", *column)
            return struct.unpack(f"<{len(column)}{_BITS[field.code]}", packed)
        # Zeros are omitted, so other falsy values must not be taken for 0.
        return column if {*map(type, column)} <= {int, bool} else list(map(index, column))

    def _union(self, field: Field, column: list[Any]) -> tuple[list[int], list[int]]:
        """Write members of a union and return their type numbers and references."""
        kinds = list(map(type, column))
        names = {kind: self._form.names[kind] for kind in {*kinds}}
        members = self._form.unions[field.of]
        numbers = {kind: members.index(name) for kind, name in names.items()}
        references = self._members([names[kind] for kind in kinds], column)
        return [numbers[kind] for kind in kinds], references

    def _members(self, names: list[str], items: Sequence[Any]) -> list[int]:
        """Write tables of several kinds and return a reference to each."""
        groups: defaultdict[str, list[Any]] = defaultdict(list)
        for name, item in zip(names, items, strict=True):
            groups[name].append(item)
        references = {name: iter(self._tables(name, group)) for name, group in groups.items()}
        return [next(references[name]) for name in names]

    def _objects(self, name: str, field: Field, column: list[Any]) -> Sequence[int | None]:
        """Write the targets of a field and return their references, None for absent ones."""
        kinds = {*map(type, column)}
        if type(None) not in kinds:
            return self._present(field, column, kinds)
        if not self._form.may_miss(name, field):
            raise TypeError(f"found None as {name}.{field.name}")
        present = [item for item in column if item is not None]
        references = iter(self._present(field, present, kinds - {type(None)}))
        return [None if item is None else next(references) for item in column]

    def _present(self, field: Field, column: list[Any], kinds: Collection[type]) -> Sequence[int]:
        if field.item:
            # Text and bytes are sequences, but not lists of numbers.
            if not {*kinds} <= {list, tuple} and not all(map(is_list, column)):
                raise TypeError("expected a list")
            if field.most and max(map(len, column), default=0) > field.most:
                raise ValueError(f"expected at most {field.most} dimensions")
            if field.item not in SCALAR_CODES:
                return self._lists(field.item, column)
            if field.item == "bool" and {*map(type, chain.from_iterable(column))} - {bool}:
                raise TypeError("expected True or False")
            pack, width = _packer(field.item), SCALAR_SIZES[field.item]
            return self._add([pack(element) for element in column], wide=width == 8)
        if field.kind == "str":
            texts = [element.encode() for element in column]
            return self._add([len(text).to_bytes(4, "little") + text + b"\0" for text in texts])
        if field.kind == "bytes":
            return [self._blob(field, byte_view(element, field.name)) for element in column]
        if field.kind == "union":
            # A union given as pairs of a table name and a dictionary.
            return self._members([name for name, _ in column], [item for _, item in column])
        return self._tables(field.kind, column)

    def _add(self, leaves: list[bytes], *, wide: bool = False) -> list[int]:
        """Write strings, vtables or scalar vectors; wide elements are aligned after the count."""
        references = self._leaves
        size, parts, places = 0, [], {}
        for leaf in dict.fromkeys(leaves):
            if leaf not in references:
                parts.append(b"\0\0\0\0" + leaf if wide else leaf + bytes(-len(leaf) % 4))
                places[leaf] = size + 4 if wide else size
                size += len(parts[-1])
        if parts:
            start = self._push(b"".join(parts), 8 if wide else 4)
            references.update({leaf: start - place for leaf, place in places.items()})
        return [references[leaf] for leaf in leaves]

    def _blob(self, field: Field, view: memoryview) -> int:
        reference = self._blobs.find(view)
        if reference is None:
            self._push(view, self._blob_alignment if field.is_aligned else 4)
            reference = self._push(len(view).to_bytes(4, "little"), 4)
            self._blobs.add(view, reference)
        return reference

    def _lists(self, name: str, lists: list[Sequence[Any]]) -> list[int]:
        """Write vectors of tables and return a reference to each."""
        references = iter(self._tables(name, [*chain.from_iterable(lists)]))
        rows = [tuple(islice(references, len(items))) for items in lists]
        new = [row for row in dict.fromkeys(rows) if row not in self._vectors]
        place = start = self._start(sum(4 + 4 * len(row) for row in new), 4)
        parts = []
        for row in new:
            self._vectors[row] = place
            offsets = map(sub, range(place - 4, place - 4 - 4 * len(row), -4), row)
            parts.append(struct.pack(f"<{1 + len(row)}I", len(row), *offsets))
            place -= 4 + 4 * len(row)
        assert self._push(b"".join(parts), 4) == start
        return [self._vectors[row] for row in rows]

    def _records(self, name: str, rows: list[_Row]) -> range:
        """Write tables with the same present fields, and their vtable."""
        fields, columns = self._form.tables[name], list(zip(*rows, strict=True))
        present = [
            column[0] is not None if field.is_offset else bool(field.default or any(column))
            for field, column in zip(fields, columns, strict=True)
        ]
        key = name, *present
        layout = self._form.layouts.get(key)
        if layout is None:
            layout = self._form.layouts[key] = _lay_out(fields, present)
        record, vtable, places, alignment = layout
        (described,) = self._add([vtable])
        stride, size = record.size, record.size * len(rows)
        start = self._start(size, alignment)
        packed: list[Iterable[Any]] = [range(described - start, described - start + size, stride)]
        for number, place in places:
            column: Iterable[Any] = columns[number]
            if fields[number].is_offset:
                first = start - place
                column = map(sub, range(first, first - size, -stride), column)
            packed.append(column)
        self._push(b"".join(starmap(record.pack, zip(*packed, strict=True))), alignment)
        return range(start, start - size, -stride)

    def _start(self, size: int, alignment: int) -> int:
        """Return the reference that the next piece of this size gets."""
        return round_up(self._size + size, alignment)

    def _push(self, piece: Piece, alignment: int) -> int:
        """Prepend a piece and return a reference to it."""
        start = self._start(len(piece), alignment)
        self._alignment = max(self._alignment, alignment)
        self._pieces += [bytes(start - self._size - len(piece)), piece]
        self._size = start
        if start > MAX_FLATBUFFER:
            raise ProgramError(
                f"the FlatBuffer would exceed the {MAX_FLATBUFFER} bytes that its format allows; "
                "for a program, extract_delegate_segments=True stores delegates outside of it"
            )
        return start


def _lay_out(
    fields: Sequence[Field], present: Sequence[bool]
) -> tuple[struct.Struct, bytes, list[tuple[int, int]], int]:
    """Return the struct of tables, their vtable, index and offset of each field, and alignment."""
    order = [number for number, is_present in enumerate(present) if is_present]
    order.sort(key=lambda number: _ORDER[fields[number].size])
    code, end, places = "<i", 4, {}
    for number in order:
        field = fields[number]
        gap = -end % field.size
        code += "x" * gap + _BITS.get(field.code, field.code)
        places[number] = end + gap
        end += gap + field.size
    slots = [places.get(number, 0) for number in range(max(order, default=-1) + 1)]
    vtable = struct.pack(f"<{2 + len(slots)}H", 4 + 2 * len(slots), end, *slots)
    alignment = 8 if any(fields[number].size == 8 for number in order) else 4
    return struct.Struct(code + "x" * (-end % alignment)), vtable, [*places.items()], alignment


@cache
def _packer(kind: str) -> Callable[[Sequence[Any]], bytes]:
    """Return a function that packs a vector of numbers as its count and elements."""
    # Most lists are short: one compiled struct per length is faster.
    code = SCALAR_CODES[kind]
    packs = [struct.Struct(f"<I{count}{code}").pack for count in range(24)]

    def pack(items: Sequence[Any]) -> bytes:
        count = len(items)
        if count < 24:
            return packs[count](count, *items)
        return struct.pack(f"<I{count}{code}", count, *items)

    return pack
