"""All sections of one FlatBuffer, and the order in which they are written."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

from lowerdeck.serializer.errors import ProgramError
from lowerdeck.serializer.flatbuffer.alignment import round_up
from lowerdeck.serializer.flatbuffer.blobs import BlobIndex
from lowerdeck.serializer.flatbuffer.sections import OFFSET_BITS, Pool, Records, Section, Vectors
from lowerdeck.serializer.flatbuffer.skeleton import Skeleton
from lowerdeck.serializer.flatbuffer.wire import Field

MAX_FLATBUFFER = (1 << 31) - 1
"""FlatBuffers' offsets are 32 bits wide and may not reach further than this."""


class Rank(IntEnum):
    """Where a section goes: parents before their children."""

    SKELETON = 0
    VECTORS = 1
    PARENTS = 2
    INNER_VECTORS = 3
    CHILDREN = 4
    LEAVES = 5


class Blobs:
    """Vectors of bytes that are too big to copy; each starts at a multiple of the alignment."""

    def __init__(self, number: int, alignment: int) -> None:
        self.base = 0
        self.alignment: int = max(alignment, 4)
        self.skew = 4
        self._origin = number << OFFSET_BITS
        self._views: list[memoryview] = []
        self._seen: BlobIndex[int] = BlobIndex()
        self._end = 0

    def add(self, view: memoryview) -> int:
        """Return a reference to a vector of these bytes."""
        found = self._seen.find(view)
        if found is None:
            found = self._origin | self._end
            self._seen.add(view, found)
            self._views.append(view)
            self._end += round_up(4 + len(view), self.alignment)
        return found

    def size(self) -> int:
        """Return the size in bytes, without padding after the last blob."""
        if not self._views:
            return 0
        last = 4 + len(self._views[-1])
        return self._end - round_up(last, self.alignment) + round_up(last, 4)

    def parts(self) -> list[bytes | memoryview]:
        """Return the bytes piece by piece, none of the blobs copied."""
        parts: list[bytes | memoryview] = []
        for index, view in enumerate(self._views):
            length = 4 + len(view)
            last = index == len(self._views) - 1
            padding = round_up(length, 4 if last else self.alignment) - length
            parts += [len(view).to_bytes(4, "little"), view, b"\0" * padding]
        return parts


class Assembly:
    """The sections of one FlatBuffer, from their making to the finished bytes."""

    def __init__(
        self, tables: Mapping[str, tuple[Field, ...]], *, start: int, blob_alignment: int
    ) -> None:
        """Make an empty assembly.

        Args:
            tables: Fields of each table by its name.
            start: Where the first table may start.
            blob_alignment: Alignment of the bytes of a blob in the file.
        """
        self._sections: list[Section | Blobs] = []
        self._ranks: list[Rank] = []
        self.skeleton: Skeleton = Skeleton(start, tables)
        self._register(self.skeleton, Rank.SKELETON)
        self.vectors: Vectors = Vectors(self._next())
        self._register(self.vectors, Rank.VECTORS)
        self.inner_vectors: Vectors = Vectors(self._next())
        self._register(self.inner_vectors, Rank.INNER_VECTORS)
        self.words: Pool = Pool(self._next())
        self._register(self.words, Rank.LEAVES)
        self.longs: Pool = Pool(self._next(), alignment=8, skew=4)
        self._register(self.longs, Rank.LEAVES)
        self._blobs = Blobs(self._next(), blob_alignment)
        self._sections.append(self._blobs)
        self._ranks.append(Rank.LEAVES)

    def records(self, rank: Rank, *, alignment: int = 4) -> Records:
        """Return new, empty records among the sections of ``rank``."""
        records = Records(self._next(), alignment=alignment)
        self._register(records, rank)
        return records

    def blob(self, view: memoryview) -> int:
        """Return a reference to a vector of bytes that are not copied."""
        return self._blobs.add(view)

    def finish(self, header: bytes) -> list[bytes | bytearray | memoryview]:
        """Return the pieces of the FlatBuffer after ``header``.

        Raises:
            ProgramError: The FlatBuffer is larger than its offsets can reach.
        """
        order = self._arrange(len(header))
        end = max(section.base + section.size() for section in self._sections)
        if end > MAX_FLATBUFFER:
            raise ProgramError(
                f"the FlatBuffer would take {end} bytes, its format allows {MAX_FLATBUFFER}; "
                "use extract_delegate_segments=True, so that delegates come after it"
            )
        bases = [section.base for section in self._sections]
        parts: list[bytes | bytearray | memoryview] = [header]
        end = len(header)
        for section in order:
            if not section.size():
                continue
            # Gaps are zeros: the same program gives the same bytes.
            parts.append(b"\0" * (section.base - end))
            end = section.base + section.size()
            if isinstance(section, Blobs):
                parts += section.parts()
            else:
                parts.append(section.pack(bases))
        return parts

    def _arrange(self, start: int) -> list[Section | Blobs]:
        """Give every section its base and return them in the order in which they are written."""
        numbers = sorted(range(len(self._sections)), key=lambda number: self._ranks[number])
        order = [self._sections[number] for number in numbers]
        order.remove(self._blobs)
        # The blobs need wide alignment: they go where that leaves the fewest bytes unused.
        _, index = min(
            (_lay_out([*order[:after], self._blobs, *order[after:]], start), -after)
            for after in range(1, len(order) + 1)
        )
        order.insert(-index, self._blobs)
        _lay_out(order, start)
        return order

    def _next(self) -> int:
        return len(self._sections)

    def _register(self, section: Section, rank: Rank) -> None:
        self._sections.append(section)
        self._ranks.append(rank)


def _lay_out(order: list[Section | Blobs], start: int) -> int:
    """Place sections one after the other and return where the last one ends."""
    end = start
    for section in order:
        size = section.size()
        if size:
            section.base = round_up(end + section.skew, section.alignment) - section.skew
            end = section.base + size
    return end
