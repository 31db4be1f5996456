"""Read FlatBuffer tables from untrusted data: each position is checked before use.

A vtable is checked once and compiled to one ``struct`` that reads all fields of its tables in one
call.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from operator import itemgetter
from typing import Any, NoReturn

from lowerdeck.serializer.errors import (
    ContentError,
    LimitError,
    MissingFieldError,
    OffsetError,
    TruncatedError,
)
from lowerdeck.serializer.flatbuffer.limits import (
    ENTRY_COST,
    FREE_MEMORY,
    LIST_COST,
    LONG_ENTRY_COST,
    MEMORY_PER_BYTE,
    PREVIEW_BYTES,
    SHAPE_COST,
    SHORT_LIST,
    SLOT_COST,
)
from lowerdeck.serializer.flatbuffer.wire import SCALAR_CODES, SCALAR_SIZES, Field

_ANY_LENGTH = 1 << 32  # a count has 32 bits
_unpack_i32 = struct.Struct("<i").unpack_from
_unpack_u32 = struct.Struct("<I").unpack_from
_unpack_vtable = struct.Struct("<HH").unpack_from


# Index into the defaults (0, False, 0.0) of absent fields, by struct code.
_DEFAULTS = {"?": 1, "f": 2, "d": 2}


class Shape:
    """A checked vtable for one kind of table.

    Attributes:
        size: Size of the table in bytes.
        wide: Offsets of 8-byte fields in the table.
        offsets: Index and start of each present field that is an offset.
        unpack: Reads the present fields in storage order.
        pick: Reorders these values and the defaults by field id; None if already in order.
    """

    __slots__ = ("offsets", "pick", "size", "unpack", "wide")

    def __init__(self, fields: tuple[Field, ...], size: int, starts: list[int]) -> None:
        self.size: int = size
        self.wide: tuple[int, ...] = tuple(
            start for field, start in zip(fields, starts, strict=True) if start and field.size == 8
        )
        order = sorted((start, index) for index, start in enumerate(starts) if start)
        code, end = ["<"], 0
        for start, index in order:
            code.append(f"{start - end}x{fields[index].code}")
            end = start + fields[index].size
        self.unpack: Callable[[memoryview, int], tuple[Any, ...]] = struct.Struct(
            "".join(code)
        ).unpack_from
        self.offsets: tuple[tuple[int, int], ...] = tuple(
            (index, start)
            for index, start in enumerate(starts)
            if start and fields[index].is_offset
        )
        # Values are in storage order, followed by the defaults of absent fields.
        position = {index: number for number, (_, index) in enumerate(order)}
        picks = [
            position.get(index, len(order) + _DEFAULTS.get(field.code, 0))
            for index, field in enumerate(fields)
        ]
        self.pick: Callable[[tuple[Any, ...]], tuple[Any, ...]] | None = None
        if picks != list(range(len(order))):
            self.pick = (
                itemgetter(*picks) if len(picks) > 1 else lambda values: (values[picks[0]],)
            )


class TableReader:
    """Reads tables, vectors and strings of one FlatBuffer.

    Positions are byte offsets in the file; ``field`` is a name for error messages.

    Attributes:
        size: Size of the FlatBuffer in bytes.
        budget: Bytes of memory that decoding may still take.
    """

    def __init__(
        self,
        data: memoryview,
        tables: Mapping[str, tuple[Field, ...]],
        *,
        strict: bool = False,
    ) -> None:
        """Create a reader.

        Args:
            data: The FlatBuffer, a flat view of bytes from the start of the file.
            tables: Fields of each table by its name.
            strict: Also reject misaligned 8-byte vector elements, which some processors cannot
                read.
        """
        self._strict = strict
        self.data = data
        self.size: int = len(data)
        self._tables = tables
        self._shapes: dict[str, dict[int, Shape]] = {name: {} for name in tables}
        self._readers: dict[str, Callable[[int], Any]] = {}
        self._strings: dict[int, str] = {}
        self._leaves: defaultdict[str, dict[int, tuple[Any, ...]]] = defaultdict(dict)
        self.budget: int = FREE_MEMORY + MEMORY_PER_BYTE * self.size

    def spend(self, cost: int, field: str, position: int) -> None:
        """Subtract ``cost`` bytes of decoded memory from the budget.

        Raises:
            LimitError: The budget is exhausted.
        """
        self.budget -= cost
        if self.budget < 0:
            raise LimitError(
                f"the file decodes to more than {MEMORY_PER_BYTE} times its {self.size} bytes, "
                "because many references point to the same objects",
                field=field,
                offset=position,
            )

    def table(self, name: str) -> Callable[[int], Any]:
        """Return a function that reads all fields of one kind of table, in id order.

        The function takes a table's position and returns scalars as numbers and offsets as
        positions in the file, 0 if absent. It raises :class:`FormatError` if the table, its vtable
        or an offset is malformed.
        """
        data, size, shapes = self.data, self.size, self._shapes[name]
        last = size - 4

        def read(position: int) -> Any:
            if position & 3 or position > last:
                self._check_table(name, position)
            vtable = position - _unpack_i32(data, position)[0]
            shape = shapes.get(vtable)
            if shape is None:
                shape = shapes[vtable] = self._new_shape(name, vtable, position)
            if position + shape.size > size or shape.wide:
                self._check_table(name, position, shape)
            values = shape.unpack(data, position)
            if shape.pick is not None:
                values = shape.pick((*values, 0, False, 0.0))
            if not shape.offsets:
                return values
            record = list(values)
            for index, start in shape.offsets:
                offset = record[index]
                target = position + start + offset
                if not offset or target > last:
                    self.target(position + start, offset, name, self._tables[name][index].name)
                record[index] = target
            return record

        return read

    def fields(self, name: str, position: int) -> Any:
        """Return all fields of one table, read with :meth:`table`."""
        if name not in self._readers:
            self._readers[name] = self.table(name)
        return self._readers[name](position)

    def _check_table(self, name: str, position: int, shape: Shape | None = None) -> None:
        end = position + (shape.size if shape else 4)
        if position & 3 or end > self.size:
            reason = f"found a misaligned table, or one that ends at byte {end} of {self.size}"
            raise OffsetError(reason, field=name, offset=position)
        for start in shape.wide if shape else ():
            if (position + start) & 7:
                reason = "found a misaligned 8-byte field, expected a multiple of 8"
                raise OffsetError(reason, field=name, offset=position + start)

    def target(self, slot: int, offset: int, table: str, field: str) -> int:
        """Return the target of the offset at ``slot``, checked to be inside the FlatBuffer."""
        position = slot + offset
        if not offset or position > self.size - 4:
            raise OffsetError(
                f"found offset {offset}, which points to byte {position}, expected an offset "
                f"above 0 and a byte up to {self.size - 4}",
                field=f"{table}.{field}",
                offset=slot,
            )
        return position

    def count(self, position: int, width: int, field: str) -> int:
        """Return the length of the vector at ``position``, checked to be inside the FlatBuffer.

        Args:
            position: Offset of the vector's length; validated here.
            width: Bytes of one element.
            field: Field name, for error messages.
        """
        if position & 3:
            raise OffsetError(
                "found a misaligned vector or string, expected a multiple of 4",
                field=field,
                offset=position,
            )
        if not 0 <= position <= self.size - 4:
            raise OffsetError(
                f"found a vector beyond the end, byte {self.size}", field=field, offset=position
            )
        count: int = _unpack_u32(self.data, position)[0]
        if position + 4 + count * width > self.size:
            raise OffsetError(
                f"found {count} elements of {width} bytes, which end after byte {self.size}",
                field=field,
                offset=position,
            )
        return count

    def scalars(self, position: int, kind: str, field: str) -> list[Any]:
        """Return a vector of scalars as a new list; an absent vector (0) is empty.

        Args:
            position: Offset of the vector's length; validated here.
            kind: Kind of the elements.
            field: Field name, for error messages.
        """
        return self.vector(kind, field)(position) if position else []

    def vector(self, kind: str, field: str, most: int = 0) -> Callable[[int], list[Any]]:
        """Return a function that reads vectors of scalars, each as a new list.

        Args:
            kind: Kind of the elements.
            field: Field name, for error messages.
            most: Largest length, for vectors with one number per dimension; 0 for no limit. The
                limit bounds the product of the sizes. Longer vectors raise :class:`LimitError`.
        """
        leaves = self._leaves[kind]
        most = most or _ANY_LENGTH
        short = min(most, SHORT_LIST)

        def read(position: int) -> list[Any]:
            items = leaves.get(position)
            if items is None:
                items = leaves[position] = self._vector(position, kind, field, most)
            count = len(items)
            if count > short:
                if count > most:
                    self._refuse_rank(count, most, field, position)
                self.budget -= LONG_ENTRY_COST * (count - short)
            self.budget -= LIST_COST + SLOT_COST * count
            if self.budget < 0:
                self.spend(0, field, position)
            return list(items)

        return read

    def _vector(self, position: int, kind: str, field: str, max_rank: int) -> tuple[Any, ...]:
        if not position:
            raise MissingFieldError("found no vector", field=field)
        width = SCALAR_SIZES[kind]
        count = self.count(position, width, field)
        if count > max_rank:
            self._refuse_rank(count, max_rank, field, position)
        if width == 8 and self._strict and count and (position + 4) & 7:
            raise OffsetError(
                "found 8-byte elements, expected a multiple of 8", field=field, offset=position + 4
            )
        self.spend(_ELEMENT_COST * count, field, position)
        if count < 24:
            return _unpackers(kind)[count](self.data, position + 4)
        return struct.unpack_from(f"<{count}{SCALAR_CODES[kind]}", self.data, position + 4)

    def _refuse_rank(self, rank: int, most: int, field: str, position: int) -> NoReturn:
        raise LimitError(
            f"found {rank} dimensions, expected at most {most}", field=field, offset=position
        )

    def tables(self, position: int, field: str) -> Iterator[int]:
        """Yield the positions of the tables in a vector; an absent vector (0) is empty."""
        if not position:
            return
        count = self.count(position, 4, field)
        self.spend(LIST_COST + ENTRY_COST * count, field, position)
        last = self.size - 4
        # In chunks, so that a vector with a false count of a billion costs only what is read.
        for start in range(0, count, 4096):
            run = min(4096, count - start)
            slot = position + 4 + 4 * start
            for offset in struct.unpack_from(f"<{run}I", self.data, slot):
                target = slot + offset
                if not offset or target > last:
                    self.target(slot, offset, field, "")
                yield target
                slot += 4

    def entry(self, vector: int, index: int) -> int:
        """Return the position of a vector entry's table, for error messages."""
        slot = vector + 4 + 4 * index
        offset: int = _unpack_u32(self.data, slot)[0]
        return slot + offset

    def string(self, position: int, field: str) -> str:
        """Return the string at ``position``.

        Raises:
            MissingFieldError: The string is absent.
            ContentError: The string is not UTF-8, or not followed by a NUL.
        """
        if not position:
            raise MissingFieldError("expected a string, found none", field=field)
        cached = self._strings.get(position)
        if cached is not None:
            # Decoded once, but every iteration over the decoded objects visits it again.
            self.budget -= LIST_COST + len(cached)
            if self.budget < 0:
                self.spend(0, field, position)
            return cached
        length = self.count(position, 1, field)
        end = position + 4 + length
        if end >= self.size or self.data[end]:
            raise ContentError(
                "found a string without a terminating NUL", field=field, offset=position
            )
        self.spend(LIST_COST + length, field, position)
        try:
            text = str(self.data[position + 4 : end], "utf-8")
        except UnicodeDecodeError as error:
            raise ContentError(
                f"found invalid UTF-8: {error}", field=field, offset=position
            ) from error
        self._strings[position] = text
        return text

    def bytes_at(self, position: int, field: str) -> memoryview:
        """Return a vector of bytes as a view; an absent one (0) is empty."""
        if not position:
            return self.data[:0]
        length = self.count(position, 1, field)
        self.spend(min(length, PREVIEW_BYTES), field, position)
        return self.data[position + 4 : position + 4 + length]

    def _new_shape(self, name: str, vtable: int, table: int) -> Shape:
        if not 0 <= vtable <= self.size - 4 or vtable & 1:
            raise OffsetError(
                f"found a vtable at {vtable}, expected an even position within {self.size} bytes",
                field=name,
                offset=table,
            )
        length, size = _unpack_vtable(self.data, vtable)
        if length < 4 or length & 1 or vtable + length > self.size or size < 4:
            raise OffsetError(
                f"found a vtable of {length} bytes for a table of {size}",
                field=name,
                offset=vtable,
            )
        fields = self._tables[name]
        # Only known fields are read: vtables may overlap, and each may claim 64 kB.
        stored = min((length - 4) // 2, len(fields))
        self.spend(SHAPE_COST, name, vtable)
        starts = list(struct.unpack_from(f"<{stored}H", self.data, vtable + 4))
        starts += [0] * (len(fields) - len(starts))
        end = 4
        for start, field in sorted(zip(starts, fields, strict=True)):
            if not start:
                continue
            if start < end or start + field.size > size or start % min(field.size, 4):
                raise OffsetError(
                    f"found {field.name} at byte {start} of a table of {size} bytes, where it "
                    "overlaps another field, is unaligned or ends outside",
                    field=f"{name}.{field.name}",
                    offset=vtable,
                )
            end = start + field.size
        return Shape(fields, size, starts)


# Bytes of an unshared number and its slot in the cached tuple.
_ELEMENT_COST = 40


@cache
def _unpackers(kind: str) -> list[Callable[..., tuple[Any, ...]]]:
    """Return functions that unpack vectors of 0 to 23 numbers, the common lengths."""
    return [struct.Struct(f"<{count}{SCALAR_CODES[kind]}").unpack_from for count in range(24)]


def root_position(data: memoryview) -> int:
    """Return the position of the root table, checked to be inside.

    Raises:
        FormatError: The FlatBuffer is too short, or the root is outside it.
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
