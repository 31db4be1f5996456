"""The few tables at the top of a FlatBuffer, written one by one, and the vtables of all."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from lowerdeck.serializer.flatbuffer.alignment import round_up
from lowerdeck.serializer.flatbuffer.sections import OFFSET_BITS
from lowerdeck.serializer.flatbuffer.wire import Field

_MASK = (1 << OFFSET_BITS) - 1
SLOT = object()
"""Stands for an offset whose target is written later, and then patched in."""


class Skeleton:
    """A growing run of tables from a known position in the file on.

    Positions are those in the file. Offsets into other sections are patched at the end, once the
    sections have their positions.
    """

    alignment = 4
    skew = 0

    def __init__(self, base: int, tables: Mapping[str, tuple[Field, ...]]) -> None:
        """Make an empty skeleton.

        Args:
            base: Where in the file it starts.
            tables: Fields of each table by its name.
        """
        self.base = base
        self._tables = tables
        self._data = bytearray()
        self._vtables: dict[bytes, int] = {}
        self._fixups: list[tuple[int, int]] = []

    def vtable(self, name: str, size: int, offsets: Mapping[str, int]) -> int:
        """Return the position of a vtable, adding it unless an equal one is here.

        Args:
            name: Name of the table.
            size: Bytes that the table takes, with its own offset to the vtable.
            offsets: Offset of each present field within the table.
        """
        entries = [offsets.get(field.name, 0) for field in self._tables[name]]
        while entries and not entries[-1]:
            entries.pop()
        count = len(entries)
        packed = struct.pack(f"<{2 + count}H", 4 + 2 * count, size, *entries)
        found = self._vtables.get(packed)
        if found is None:
            found = self._vtables[packed] = self._grow(2)
            self._data += packed
        return found

    def table(
        self, name: str, values: Mapping[str, object], *, zeros: bool = False
    ) -> dict[str, int]:
        """Write a table and return where each of its slots is, and under ``""`` itself.

        Args:
            name: Name of the table.
            values: For each field that is present a number, for an offset a reference or
                ``SLOT``.
            zeros: Whether zeros are written; they are left out where they are what readers take
                for a field that is not there.
        """
        present = [
            (field, values[field.name])
            for field in self._tables[name]
            if values.get(field.name) is not None
            and (zeros or field.is_offset or values[field.name])
        ]
        # Widest first: no padding between fields.
        present.sort(key=lambda item: -item[0].size)
        offsets: dict[str, int] = {}
        size = 4
        for field, _ in present:
            offsets[field.name] = size
            size += field.size
        size = round_up(size, 4)
        vtable = self.vtable(name, size, offsets)
        wide = any(field.size == 8 for field, _ in present)
        # 8-byte fields come right after the 4 bytes that lead to the vtable.
        position = self._grow(8, 4) if wide else self._grow(4)
        self._data += struct.pack("<i", position - vtable).ljust(size, b"\0")
        slots = {"": position}
        for field, value in present:
            slot = position + offsets[field.name]
            if value is SLOT:
                slots[field.name] = slot
            elif field.is_offset:
                self._fixups.append((slot, int(value)))  # type: ignore[call-overload]
            else:
                struct.pack_into(f"<{field.code}", self._data, slot - self.base, value)
        return slots

    def vector(self, count: int) -> tuple[int, range]:
        """Write a vector of ``count`` offsets; return its position and those of its slots."""
        position = self._grow(4)
        self._data += struct.pack("<I", count).ljust(4 + 4 * count, b"\0")
        return position, range(position + 4, position + 4 + 4 * count, 4)

    def wide_vector(self, numbers: Sequence[int]) -> int:
        """Write a vector of unsigned 64-bit numbers and return its position."""
        position = self._grow(8, 4)
        self._data += struct.pack(f"<I{len(numbers)}Q", len(numbers), *numbers)
        return position

    def patch(self, slot: int, target: int) -> None:
        """Let the slot lead to a position of the skeleton itself."""
        struct.pack_into("<I", self._data, slot - self.base, target - slot)

    def size(self) -> int:
        """Return the size in bytes, up to a whole word."""
        return round_up(len(self._data), 4)

    def pack(self, bases: Sequence[int]) -> bytearray:
        """Return the bytes with every offset filled in."""
        for slot, reference in self._fixups:
            target = bases[reference >> OFFSET_BITS] + (reference & _MASK)
            struct.pack_into("<I", self._data, slot - self.base, target - slot)
        return self._data.ljust(self.size(), b"\0")

    def _grow(self, alignment: int, skew: int = 0) -> int:
        end = self.base + len(self._data)
        start = round_up(end + skew, alignment) - skew
        self._data += b"\0" * (start - end)
        return start
