"""Split a `.pte` file into its FlatBuffer and its segments.

The extended header follows the first 8 bytes of the FlatBuffer (root offset and identifier)::

    8   "eh00"
    12  u32  length of this header, at least 24; we write 32
    16  u64  size of the FlatBuffer, with its first 8 bytes and this header
    24  u64  offset of the first segment from the start of the file
    32  u64  bytes from that offset to the end of the last segment (absent in a header of 24 bytes)
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

from lowerdeck.serializer.errors import MagicError, OffsetError, SegmentError, TruncatedError
from lowerdeck.serializer.flatbuffer.alignment import round_up
from lowerdeck.serializer.flatbuffer.wire import (
    BUNDLE_IDENTIFIER,
    EXTERNAL_IDENTIFIER,
    FILE_IDENTIFIER,
)
from lowerdeck.serializer.pte.layout import FileLayout
from lowerdeck.serializer.pte.schema import DataSegment

EXTENDED_MAGIC = b"eh00"
HEADER_START = 8
HEADER_LENGTH = 32
OLD_HEADER_LENGTH = 24
_STRUCT = struct.Struct("<4sIQQQ")


@dataclass(frozen=True, slots=True)
class ExtendedHeader:
    """Fields of the extended header.

    Attributes:
        length: Length of the header in bytes.
        program_size: Size of the FlatBuffer in bytes.
        segment_base_offset: Offset of the segments, 0 if there are none.
        segment_data_size: Bytes from that offset to the end of the last segment, 0 if unknown.
    """

    length: int
    program_size: int
    segment_base_offset: int
    segment_data_size: int

    def pack(self) -> bytes:
        """Return the encoded header of 32 bytes."""
        return _STRUCT.pack(
            EXTENDED_MAGIC,
            self.length,
            self.program_size,
            self.segment_base_offset,
            self.segment_data_size,
        )


def check_range(value: int, least: int, most: int, size: int, field: str, offset: int) -> None:
    """Raise if a number of a header is out of range.

    Args:
        size: Size of the file.
        field: Name of the number, for the message.
        offset: Offset of the number in the file.

    Raises:
        OffsetError: The number is out of range.
        TruncatedError: The number is out of range and beyond the end of the file.
    """
    if not least <= value <= most:
        kind = TruncatedError if value > size else OffsetError
        reason = f"found {value}, expected {least} to {most}"
        raise kind(reason, field=f"header.{field}", offset=offset)


def inserted_size(layout: FileLayout) -> int:
    """Return how many bytes a writer inserts for the header.

    The number is a multiple of the alignments of constants and inline delegates, so that the data
    after the header stay aligned.
    """
    strictest = max(layout.constant_tensor_alignment, layout.delegate_alignment)
    return round_up(HEADER_LENGTH, strictest)


_OTHER_FILES = {
    EXTERNAL_IDENTIFIER: "; this is a .ptd, open it as external data",
    BUNDLE_IDENTIFIER: "; this is a .bpte, a program with test cases for ExecuTorch's tools",
}


class Container(NamedTuple):
    """The parts of one file.

    Attributes:
        header: The extended header, or None if the file has none.
    """

    data: memoryview
    header: ExtendedHeader | None
    program: memoryview

    @property
    def segment_base(self) -> int:
        """Return the offset of the segments, 0 if there are none."""
        return self.header.segment_base_offset if self.header else 0

    @property
    def segment_end(self) -> int:
        """Return the offset beyond which no segment may extend, 0 if there are none."""
        if self.header is None or not self.header.segment_base_offset:
            return 0
        size = self.header.segment_data_size
        return self.header.segment_base_offset + size if size else len(self.data)

    def segment(self, index: int, segments: list[DataSegment], field: str) -> memoryview:
        """Return the bytes of one segment.

        Raises:
            SegmentError: The segment does not exist, or ends beyond the file.
        """
        if index >= len(segments):
            raise SegmentError(
                f"found segment index {index}, but the file has {len(segments)} segments",
                field=field,
            )
        self.check_segment(index, segments[index])
        start = self.segment_base + segments[index].offset
        return self.data[start : start + segments[index].size]

    def check_segment(self, index: int, segment: DataSegment) -> None:
        """Raise if a segment ends beyond the file.

        Raises:
            SegmentError: The segment ends beyond the file.
        """
        if not segment.size:
            return
        if self.header is None or not self.segment_base:
            raise SegmentError(
                f"found {segment.size} bytes, but the file has no extended header (magic "
                f"{EXTENDED_MAGIC!r}) that gives the start of segments",
                field=f"Program.segments[{index}]",
            )
        if self.segment_base + segment.offset + segment.size > self.segment_end:
            raise SegmentError(
                f"found bytes {segment.offset} to {segment.offset + segment.size} after "
                f"{self.segment_base}, but the segments end at {self.segment_end}",
                field=f"Program.segments[{index}]",
            )


def open_container(data: memoryview) -> Container:
    """Return the parts of a file after checking its identifier and header.

    Args:
        data: The file as a flat view of bytes.

    Raises:
        FormatError: The file is not a `.pte`, or its header is inconsistent.
    """
    if len(data) < HEADER_START:
        raise TruncatedError(f"found {len(data)} bytes, expected at least 8", field="file")
    magic = data[4:8].tobytes()
    if magic != FILE_IDENTIFIER:
        hint = _OTHER_FILES.get(magic, "")
        raise MagicError(
            f"found {magic!r}, expected {FILE_IDENTIFIER!r}{hint}",
            field="file identifier",
            offset=4,
        )
    header = read_header(data)
    return Container(data, header, data[: header.program_size] if header else data)


def read_header(data: memoryview) -> ExtendedHeader | None:
    """Return the extended header, or None if the file has none.

    Raises:
        FormatError: The header is inconsistent, or does not match the file size.
    """
    if data[HEADER_START : HEADER_START + 4].tobytes() != EXTENDED_MAGIC:
        return None
    if len(data) < HEADER_START + OLD_HEADER_LENGTH:
        raise TruncatedError(
            f"found {len(data)} bytes, which end inside the header", field="header"
        )
    length, program_size, base = struct.unpack_from("<IQQ", data, HEADER_START + 4)
    size, least = len(data), HEADER_START + OLD_HEADER_LENGTH
    check_range(HEADER_START + length, least, size, size, "length", HEADER_START + 4)
    data_size = 0
    if length >= HEADER_LENGTH:
        (data_size,) = struct.unpack_from("<Q", data, 32)
    check_range(program_size, HEADER_START + length, size, size, "program_size", 16)
    if base:
        check_range(base, program_size, size, size, "segment_base_offset", 24)
    most = size if base else 0
    check_range(base + data_size, base, most, size, "segment_data_size", 32)
    return ExtendedHeader(length, program_size, base, data_size)
