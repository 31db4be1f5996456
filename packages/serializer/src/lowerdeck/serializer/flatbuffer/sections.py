"""The parts that a FlatBuffer is put together from, each laid out before its position is known.

FlatBuffers' offsets lead forward only, so a parent comes before its children. Rather than
building one record at a time from the back, as its builder does, equal-shaped records are
collected as columns; when all parts have their positions, each column becomes one array operation.

A *reference* is an integer: ``section number << 32 | offset within the section``.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Protocol

from lowerdeck.serializer.errors import ProgramError
from lowerdeck.serializer.flatbuffer.alignment import round_up

OFFSET_BITS = 32
_MASK = (1 << OFFSET_BITS) - 1


class Section(Protocol):
    """A run of bytes whose size is known before its position."""

    base: int
    alignment: int
    skew: int

    def size(self) -> int:
        """Return the size in bytes."""

    def pack(self, bases: Sequence[int]) -> bytes | bytearray:
        """Return the bytes, once every section has its base.

        Args:
            bases: The position of each section, by its number.
        """


class Pool:
    """Leaves (strings, vectors of scalars) of which equal ones are stored once."""

    def __init__(self, number: int, *, alignment: int = 4, skew: int = 0) -> None:
        """Make an empty pool.

        Args:
            number: Number of the section.
            alignment: Each leaf starts at a multiple of this after the first one.
            skew: How many bytes before such a multiple the first one starts: 4 for vectors of
                8-byte elements, whose count takes 4 bytes.
        """
        self.base = 0
        self.alignment = alignment
        self.skew = skew
        self._origin = number << OFFSET_BITS
        self._data = bytearray()
        self._seen: dict[bytes, int] = {}

    def add(self, leaf: bytes) -> int:
        """Return a reference to ``leaf``, storing it unless an equal one is here."""
        found = self._seen.get(leaf)
        if found is None:
            data = self._data
            gap = -len(data) % self.alignment
            if gap:
                data += b"\0" * gap
            found = self._seen[leaf] = self._origin | len(data)
            data += leaf
        return found

    def add_string(self, text: str) -> int:
        """Return a reference to a string."""
        raw = text.encode()
        return self.add(struct.pack("<I", len(raw)) + raw + b"\0")

    def size(self) -> int:
        """Return the size in bytes, up to a whole word."""
        return round_up(len(self._data), 4)

    def pack(self, bases: Sequence[int]) -> bytearray:  # noqa: ARG002  (leaves refer to nothing)
        """Return the leaves."""
        return self._data.ljust(self.size(), b"\0")


class Vectors:
    """Vectors of offsets to tables."""

    alignment = 4
    skew = 0

    def __init__(self, number: int) -> None:
        self.base = 0
        self._origin = number << OFFSET_BITS
        self._vectors: list[Sequence[int]] = []
        self._size = 0

    def add(self, references: Sequence[int]) -> int:
        """Return a reference to a new vector of references."""
        found = self._origin | self._size
        self._vectors.append(references)
        self._size += 4 + 4 * len(references)
        return found

    def size(self) -> int:
        """Return the size in bytes."""
        return self._size

    def pack(self, bases: Sequence[int]) -> bytes:
        """Return all vectors, each with its count before it."""
        words = array("I")
        position = self.base
        for vector in self._vectors:
            words.append(len(vector))
            words.extend(resolve(vector, range(position + 4, _FAR, 4), bases))
            position += 4 + 4 * len(vector)
        return little_endian(words)


class Records:
    """Tables of one shape: the same words, of which some are columns.

    The words of a record are declared once, in order; then its columns are appended to.
    """

    skew = 0

    def __init__(self, number: int, *, alignment: int = 4) -> None:
        self.base = 0
        self.alignment = alignment
        self.count: int = 0
        self._origin = number << OFFSET_BITS
        self._width = 0
        self._constants: list[tuple[int, int]] = []
        self._tables: list[tuple[int, int]] = []
        self._numbers: list[tuple[int, str, list[int], str]] = []
        self._references: list[tuple[int, list[int]]] = []

    def table(self, vtable: int) -> None:
        """Let a table start at the next word.

        Args:
            vtable: Position of its vtable in the file.
        """
        self._tables.append((self._next(), vtable))

    def constant(self, value: int) -> None:
        """Let the next word be the same in all records."""
        self._constants.append((self._next(), value))

    def numbers(self, code: str, name: str) -> list[int]:
        """Let the next word be a number; return the column to append to.

        Args:
            code: ``"i"`` for signed, ``"I"`` for unsigned.
            name: What the number is, for messages.
        """
        column: list[int] = []
        self._numbers.append((self._next(), code, column, name))
        return column

    def references(self) -> list[int]:
        """Let the next word be an offset; return the column of references to append to."""
        column: list[int] = []
        self._references.append((self._next(), column))
        return column

    def append(self) -> int:
        """Count one more record, whose columns were appended to, and return a reference to it."""
        found = self._origin | self.count * 4 * self._width
        self.count += 1
        return found

    def extend(self, count: int) -> range:
        """Count more records at once; return the references to them."""
        stride = 4 * self._width
        start = self._origin | self.count * stride
        self.count += count
        return range(start, start + count * stride, stride)

    def size(self) -> int:
        """Return the size in bytes."""
        return self.count * 4 * self._width

    def pack(self, bases: Sequence[int]) -> bytes:
        """Return all records.

        Raises:
            ProgramError: A number does not fit its field.
        """
        width, count = self._width, self.count
        if not count:
            return b""
        words = array("I", bytes(self.size()))
        stride = 4 * width
        for index, value in self._constants:
            words[index::width] = array("I", [value]) * count
        for index, vtable in self._tables:
            # A table begins with the distance back to its vtable, which grows from record to
            # record.
            start = self.base + 4 * index - vtable
            words[index::width] = array("I", range(start, start + count * stride, stride))
        for index, code, column, name in self._numbers:
            words[index::width] = _words(code, column, name)
        for index, column in self._references:
            positions = range(self.base + 4 * index, _FAR, stride)
            words[index::width] = array("I", resolve(column, positions, bases))
        return little_endian(words)

    def _next(self) -> int:
        self._width += 1
        return self._width - 1


_FAR = 1 << 40


def resolve(
    references: Iterable[int], positions: Iterable[int], bases: Sequence[int]
) -> Iterable[int]:
    """Return the offsets to write at ``positions`` so that they lead to ``references``."""
    # A comprehension over columns, because this runs once for every offset of a file.
    return [
        bases[reference >> OFFSET_BITS] + (reference & _MASK) - position
        for reference, position in zip(references, positions, strict=False)
    ]


def little_endian(words: array[int]) -> bytes:
    """Return the bytes of an array as they are in the file."""
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def _words(code: str, column: list[int], name: str) -> array[int]:
    try:
        packed = array(code, column)
    except (OverflowError, TypeError) as error:
        raise ProgramError(f"{name}: {_first_bad(code, column)}; expected 32 bits") from error
    return packed if code == "I" else array("I", packed.tobytes())


def _first_bad(code: str, column: list[int]) -> str:
    for number in column:
        try:
            array(code, [number])
        except (OverflowError, TypeError):
            return f"found {number!r}"
    return "found a number that does not fit"
