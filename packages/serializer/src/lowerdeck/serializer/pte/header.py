"""The extended header, which locates the segments.

It follows the first 8 bytes of the FlatBuffer (root offset and identifier)::

    8   "eh00"
    12  u32  length of this header, at least 24; we write 32
    16  u64  size of the FlatBuffer, with its first 8 bytes and this header
    24  u64  offset of the first segment from the start of the file
    32  u64  bytes from there to the end of the last segment (absent in a header of 24 bytes)
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from lowerdeck.serializer.errors import OffsetError, TruncatedError
from lowerdeck.serializer.flatbuffer.alignment import round_up
from lowerdeck.serializer.pte.layout import FileLayout

EXTENDED_MAGIC = b"eh00"
HEADER_START = 8
HEADER_LENGTH = 32
OLD_HEADER_LENGTH = 24
_STRUCT = struct.Struct("<4sIQQQ")


@dataclass(frozen=True, slots=True)
class ExtendedHeader:
    """Fields of the extended header.

    Attributes:
        program_size: Size of the FlatBuffer in bytes.
        segment_base_offset: Offset of the segments, 0 if there are none.
        segment_data_size: Bytes from there to the end of the last segment, 0 if unknown.
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

    Raises:
        OffsetError: The number is out of range.
        TruncatedError: It is out of range and beyond the end of the file.
    """
    if not least <= value <= most:
        kind = TruncatedError if value > size else OffsetError
        reason = f"found {value}, expected {least} to {most}"
        raise kind(reason, field=f"header.{field}", offset=offset)


def inserted_size(layout: FileLayout) -> int:
    """Return how many bytes a writer inserts for the header.

    A multiple of both alignments, so that the following data stay aligned.
    """
    strictest = max(layout.constant_tensor_alignment, layout.delegate_alignment)
    return round_up(HEADER_LENGTH, strictest)
