"""FlatBuffer tables read without trust: each place is checked before it is used.

A vtable is checked once and compiled into one ``struct`` that reads all fields of its tables in
one call, which makes the checks cheaper than the peer's unchecked reading.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter
from typing import Any

from lowerdeck.serializer.errors import (
    AlignmentError,
    LimitError,
    MissingFieldError,
    OffsetError,
    TableError,
    TextError,
    TruncatedError,
)
from lowerdeck.serializer.limits import FREE_MEMORY, LIST_COST, MEMORY_PER_BYTE, SLOT_COST
from lowerdeck.serializer.wire import SCALAR_SIZES, Field

_unpack_i32 = struct.Struct("<i").unpack_from
_unpack_u32 = struct.Struct("<I").unpack_from
_unpack_vtable = struct.Struct("<HH").unpack_from


class Shape:
    """One checked vtable of one kind of table.

    Attributes:
        size: Bytes that the table takes.
        places: Offset of each field in the table, 0 if absent.
        unpack: Reads the present fields, in the order in which they stand.
        pick: Brings them into id order, followed by the defaults of the absent ones.
        wide: Whether a field is 8 bytes wide.
    """

    __slots__ = ("name", "pick", "places", "size", "unpack", "wide")

    def __init__(self, name: str, fields: tuple[Field, ...], size: int, places: list[int]) -> None:
        self.name = name
        self.size = size
        self.places = tuple(places)
        self.wide: tuple[int, ...] = tuple(
            place for field, place in zip(fields, places, strict=True) if place and field.size == 8
        )
        order = sorted((place, index) for index, place in enumerate(places) if place)
        code, end = ["<"], 0
        for place, index in order:
            code.append(f"{place - end}x{fields[index].code}")
            end = place + fields[index].size
        self.unpack = struct.Struct("".join(code)).unpack_from
        # Values come in file order; the last one of the tuple is the default of absent fields.
        position = {index: number for number, (_, index) in enumerate(order)}
        picks = [position.get(index, len(order)) for index in range(len(fields))]
        self.pick: Callable[[tuple[Any, ...]], tuple[Any, ...]]
        if len(picks) > 1:
            self.pick = itemgetter(*picks)
        else:
            self.pick = lambda values: tuple(values[pick] for pick in picks)


class TableReader:
    """Reads tables, vectors and strings of one FlatBuffer.

    Attributes:
        data: The FlatBuffer.
        size: Its size in bytes.
    """

    def __init__(
        self,
        data: memoryview,
        tables: Mapping[str, tuple[Field, ...]],
        *,
        strict: bool = False,
    ) -> None:
        """Make a reader.

        Args:
            data: The FlatBuffer, a flat view of bytes from the start of the file.
            tables: Fields of each table by its name.
            strict: Also refuse 8-byte elements of vectors at addresses that some processors
                cannot read.
        """
        self._strict = strict
        self.data = data
        self.size = len(data)
        self._tables = tables
        self._shapes: dict[str, dict[int, Shape]] = {name: {} for name in tables}
        self._strings: dict[int, str] = {}
        self._vectors: dict[str, list[Callable[..., tuple[Any, ...]]]] = {
            code: [struct.Struct(f"<{count}{code}").unpack_from for count in range(24)]
            for code in "iBqQd?"
        }
        self._budget = FREE_MEMORY + MEMORY_PER_BYTE * self.size

    def spend(self, cost: int, field: str, position: int) -> None:
        """Count bytes of memory that something decodes to.

        Raises:
            LimitError: The file decodes to more than its size is worth.
        """
        self._budget -= cost
        if self._budget < 0:
            raise LimitError(
                f"the file decodes to more than {MEMORY_PER_BYTE} times its {self.size} bytes, "
                "by referring to the same objects again and again",
                field=field,
                offset=position,
            )

    def shape(self, name: str, position: int) -> Shape:
        """Return the checked shape of the table at ``position``.

        Raises:
            FormatError: The table or its vtable is malformed or outside the FlatBuffer.
        """
        if position & 3:
            raise AlignmentError(
                "found a table, expected a multiple of 4", field=name, offset=position
            )
        if not 0 <= position <= self.size - 4:
            raise OffsetError(
                f"found a table outside the {self.size} bytes", field=name, offset=position
            )
        vtable = position - _unpack_i32(self.data, position)[0]
        shape = self._shapes[name].get(vtable)
        if shape is None:
            shape = self._shapes[name][vtable] = self._new_shape(name, vtable, position)
        if position + shape.size > self.size:
            raise OffsetError(
                f"found a table of {shape.size} bytes that ends behind the {self.size} bytes",
                field=name,
                offset=position,
            )
        for place in shape.wide:
            if (position + place) & 7:
                raise AlignmentError(
                    "found an 8-byte field, expected a multiple of 8",
                    field=name,
                    offset=position + place,
                )
        return shape

    def fields(self, name: str, position: int) -> tuple[Any, ...]:
        """Return all fields of a table in id order.

        Scalars are numbers; offsets are positions in the file, or 0 where absent.
        """
        shape = self.shape(name, position)
        values = shape.pick((*shape.unpack(self.data, position), 0))
        fields = self._tables[name]
        return tuple(
            self.target(position + place, value, name, field.name)
            if place and field.is_offset
            else value
            for field, place, value in zip(fields, shape.places, values, strict=True)
        )

    def target(self, place: int, offset: int, table: str, field: str) -> int:
        """Return where the offset at ``place`` leads, checked to be inside the FlatBuffer."""
        found = place + offset
        if not offset or found > self.size - 4:
            raise OffsetError(
                f"found offset {offset}, which leads to byte {found} of {self.size}",
                field=f"{table}.{field}",
                offset=place,
            )
        return found

    def count(self, position: int, width: int, field: str) -> int:
        """Return the number of elements of the vector at ``position``, checked to be there.

        Args:
            position: Where the vector's count stands; checked here.
            width: Bytes of one element.
            field: What is read, for messages.
        """
        if position & 3:
            raise AlignmentError(
                "found a vector or string, expected a multiple of 4", field=field, offset=position
            )
        if not 0 <= position <= self.size - 4:
            raise OffsetError(
                f"found a vector outside the {self.size} bytes", field=field, offset=position
            )
        count: int = _unpack_u32(self.data, position)[0]
        if position + 4 + count * width > self.size:
            raise OffsetError(
                f"found {count} elements of {width} bytes, which end behind the {self.size} bytes",
                field=field,
                offset=position,
            )
        return count

    def scalars(self, position: int, kind: str, field: str) -> list[Any]:
        """Return a vector of scalars as a new list; an absent one (0) is empty."""
        if not position:
            return []
        width = SCALAR_SIZES[kind]
        count = self.count(position, width, field)
        self._budget -= LIST_COST + SLOT_COST * count
        if self._budget < 0:
            self.spend(0, field, position)
        if width == 8 and self._strict and count and (position + 4) & 7:
            raise AlignmentError(
                "found 8-byte elements, expected a multiple of 8", field=field, offset=position + 4
            )
        code = _VECTOR_CODES[kind]
        if count < 24:
            return list(self._vectors[code][count](self.data, position + 4))
        return list(struct.unpack_from(f"<{count}{code}", self.data, position + 4))

    def tables(self, position: int, field: str) -> Iterator[int]:
        """Yield the positions of the tables in a vector; an absent one (0) is empty."""
        if not position:
            return
        count = self.count(position, 4, field)
        self.spend(LIST_COST + SLOT_COST * count, field, position)
        last = self.size - 4
        # In runs, so that a vector that says it has a billion entries costs what is read of it.
        for start in range(0, count, 4096):
            run = min(4096, count - start)
            place = position + 4 + 4 * start
            for offset in struct.unpack_from(f"<{run}I", self.data, place):
                found = place + offset
                if not offset or found > last:
                    self.target(place, offset, field, "")
                yield found
                place += 4

    def entry(self, vector: int, index: int) -> int:
        """Return where the table of one entry of a vector is, for messages."""
        place = vector + 4 + 4 * index
        offset: int = _unpack_u32(self.data, place)[0]
        return place + offset

    def string(self, position: int, field: str) -> str:
        """Return the string at ``position``.

        Raises:
            MissingFieldError: It is absent.
            TextError: It is no UTF-8, or not followed by a NUL.
        """
        if not position:
            raise MissingFieldError("expected a string, found none", field=field)
        found = self._strings.get(position)
        if found is not None:
            return found
        length = self.count(position, 1, field)
        end = position + 4 + length
        if end >= self.size or self.data[end]:
            raise TextError("found no NUL behind the string", field=field, offset=position)
        self.spend(LIST_COST + length, field, position)
        try:
            text = str(self.data[position + 4 : end], "utf-8")
        except UnicodeDecodeError as error:
            raise TextError(f"found no UTF-8: {error}", field=field, offset=position) from error
        self._strings[position] = text
        return text

    def bytes_at(self, position: int, field: str) -> memoryview:
        """Return a vector of bytes as a view; an absent one (0) is empty."""
        if not position:
            return self.data[:0]
        length = self.count(position, 1, field)
        return self.data[position + 4 : position + 4 + length]

    def _new_shape(self, name: str, vtable: int, table: int) -> Shape:
        if not 0 <= vtable <= self.size - 4 or vtable & 1:
            raise TableError(
                f"found a vtable at {vtable}, expected an even place within {self.size} bytes",
                field=name,
                offset=table,
            )
        length, size = _unpack_vtable(self.data, vtable)
        if length < 4 or length & 1 or vtable + length > self.size or size < 4:
            raise TableError(
                f"found a vtable of {length} bytes for a table of {size}",
                field=name,
                offset=vtable,
            )
        fields = self._tables[name]
        stored = (length - 4) // 2
        places = list(struct.unpack_from(f"<{stored}H", self.data, vtable + 4))[: len(fields)]
        places += [0] * (len(fields) - len(places))
        end = 4
        for place, field in sorted(zip(places, fields, strict=True)):
            if not place:
                continue
            if place < end or place + field.size > size or place % min(field.size, 4):
                raise TableError(
                    f"found {field.name} at byte {place} of a table of {size} bytes, where it "
                    "overlaps another field, is unaligned or ends outside",
                    field=f"{name}.{field.name}",
                    offset=vtable,
                )
            end = place + field.size
        return Shape(name, fields, size, places)


_VECTOR_CODES = {"i32": "i", "u8": "B", "i64": "q", "u64": "Q", "f64": "d", "bool": "?"}


def root_position(data: memoryview) -> int:
    """Return the position of the root table, checked to be inside.

    Raises:
        FormatError: The FlatBuffer is too short, or the root lies outside it.
    """
    if len(data) < 8:
        raise TruncatedError(
            f"found {len(data)} bytes, expected at least 8", field="file", offset=0
        )
    root: int = _unpack_u32(data, 0)[0]
    if not 8 <= root <= len(data) - 4:
        raise OffsetError(
            f"found a root table at {root} of {len(data)} bytes", field="root", offset=0
        )
    return root
