"""Read external data from `.ptd` files; every offset is checked before use."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from typing import TYPE_CHECKING

from lowerdeck.serializer.errors import (
    ContentError,
    MagicError,
    MissingFieldError,
    SegmentError,
    TruncatedError,
)
from lowerdeck.serializer.flatbuffer.limits import ENTRY_COST
from lowerdeck.serializer.flatbuffer.objects import ObjectReader
from lowerdeck.serializer.flatbuffer.storage import byte_view
from lowerdeck.serializer.flatbuffer.tables import root_position
from lowerdeck.serializer.flatbuffer.wire import EXTERNAL_IDENTIFIER
from lowerdeck.serializer.ptd.external_write import (
    EXTERNAL_FORMAT,
    HEADER_LENGTH,
    HEADER_MAGIC,
    HEADER_STRUCT,
    ExternalData,
    ExternalEntry,
)
from lowerdeck.serializer.pte.container import check_range
from lowerdeck.serializer.pte.layout import segment_alignment
from lowerdeck.serializer.pte.named_data import TensorLayout
from lowerdeck.serializer.pte.read import Closing, map_file
from lowerdeck.serializer.pte.resolve import check_overlap
from lowerdeck.serializer.pte.schema import DataSegment

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def deserialize_ptd(data: ReadableBuffer) -> ExternalData:
    """Return the external data of a `.ptd` file, with buffers as views of ``data``.

    Keys, segments, shapes and tensor sizes are checked.

    Args:
        data: The file: bytes, a memory map, or anything else with the buffer protocol.

    Returns:
        The external data; alignments of single entries are not inferred.

    Raises:
        FormatError: The file is malformed.
    """
    view = byte_view(data, "the file")
    fb_size, base, data_size = _read_header(view)
    objects = ObjectReader(view[:fb_size], EXTERNAL_FORMAT, strict=True)
    reader = objects.tables
    version, segment_table, named_table = reader.fields(
        "FlatTensor", root_position(view[:fb_size])
    )
    for table, name in ((segment_table, "segments"), (named_table, "named_data")):
        if not table:
            raise MissingFieldError("found no vector", field=f"FlatTensor.{name}")
    segments: list[DataSegment] = objects.objects(
        segment_table, "DataSegment", "FlatTensor.segments"
    )
    for index, segment in enumerate(segments):
        if segment.offset + segment.size > data_size:
            raise SegmentError(
                f"found the end {segment.offset + segment.size}, expected at most {data_size}",
                field=f"FlatTensor.segments[{index}]",
            )
    check_overlap(segments, len(view), "FlatTensor.segments")
    alignment = segment_alignment([base, *(segment.offset for segment in segments)])
    entries: dict[str, ExternalEntry] = {}
    views: dict[int, memoryview] = {}
    for at in reader.tables(named_table, "FlatTensor.named_data"):
        reader.spend(2 * ENTRY_COST, "FlatTensor.named_data", at)
        key_at, number, layout_at = reader.fields("NamedData", at)
        key = reader.string(key_at, "NamedData.key")
        if key in entries:
            raise ContentError(f"found the key {key!r} twice", field="NamedData.key", offset=at)
        if number >= len(segments):
            raise SegmentError(
                f"found segment {number} for {key!r}, expected one of {len(segments)}",
                field="NamedData.segment_index",
                offset=at,
            )
        start = base + segments[number].offset
        layout = _layout(objects, layout_at, segments[number].size, key) if layout_at else None
        if number not in views:
            # One view per segment, so that equal contents can be found by identity.
            views[number] = view[start : start + segments[number].size]
        entries[key] = ExternalEntry(views[number], layout, alignment)
    return ExternalData(entries, alignment, version)


def open_ptd(path: str | os.PathLike[str]) -> PtdFile:
    """Open a `.ptd` file as a memory map.

    Returns:
        The open file; use it in a ``with`` block, or call :meth:`PtdFile.close`.

    Raises:
        FormatError: The file is malformed.
        OSError: The file cannot be opened.
    """
    mapped = map_file(path)
    if mapped is None:
        raise TruncatedError("found an empty file", field="file")
    return PtdFile(mapped)


class PtdFile(Closing):
    """An open `.ptd` file.

    Attributes:
        data: Contents of the file as views of the memory map; views that are still referenced stay
            valid after ``close``.
    """

    def __init__(self, mapped: mmap.mmap) -> None:
        """Read the tables of a file.

        Args:
            mapped: The memory map of the whole file, closed with this object.

        Raises:
            FormatError: The file is malformed.
        """
        self._mapped = mapped
        self.data: ExternalData = deserialize_ptd(mapped)

    @property
    def entries(self) -> dict[str, ExternalEntry]:
        """Return the entries by their keys."""
        return self.data.entries

    def close(self) -> None:
        """Close the file."""
        self.data = ExternalData()
        with suppress(BufferError):
            self._mapped.close()


def _read_header(view: memoryview) -> tuple[int, int, int]:
    """Return the end of the FlatBuffer, the segment base, and the total size of the segments."""
    if len(view) < 8 + HEADER_LENGTH:
        raise TruncatedError(
            f"found {len(view)} bytes, expected at least {8 + HEADER_LENGTH}", field="file"
        )
    magic = view[4:8].tobytes()
    if magic != EXTERNAL_IDENTIFIER:
        raise MagicError(
            f"found {magic!r}, expected {EXTERNAL_IDENTIFIER!r}",
            field="file identifier",
            offset=4,
        )
    header_magic, length, inserted, size, base, data_size = HEADER_STRUCT.unpack_from(view, 8)
    if header_magic != HEADER_MAGIC:
        raise MagicError(
            f"found {header_magic!r}, expected {HEADER_MAGIC!r}", field="header", offset=8
        )
    file_size, end = len(view), inserted + size
    check_range(length, HEADER_LENGTH, file_size, file_size, "length", 12)
    check_range(end, 8 + length, min(base, file_size), file_size, "flatbuffer_size", 24)
    check_range(base + data_size, base, file_size, file_size, "segment_data_size", 40)
    return end, base, data_size


def _layout(objects: ObjectReader, position: int, size: int, key: str) -> TensorLayout:
    field = "TensorLayout"
    layout: TensorLayout = objects.object_at(position, field)
    if layout.problem():
        raise ContentError(f"{layout.problem()}, for {key!r}", field=field, offset=position)
    if layout.nbytes > size:
        raise SegmentError(
            f"found {size} bytes for {key!r}, expected {layout.nbytes}",
            field=field,
            offset=position,
        )
    return layout
