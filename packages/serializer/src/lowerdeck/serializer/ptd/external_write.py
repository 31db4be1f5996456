"""Data outside the program, and the `.ptd` files (FlatTensor, ``FT01``) that hold them.

A `.ptd` begins like a `.pte`, but its header is always there and counts the FlatBuffer otherwise::

    8   "FH01"
    12  u32  length of this header, at least 40; we write 40
    16  u64  bytes inserted before the rest of the FlatBuffer: 48
    24  u64  size of the FlatBuffer without them
    32  u64  offset of the first segment from the start of the file
    40  u64  bytes from there to the end of the last segment
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import BinaryIO

from lowerdeck.serializer.errors import ProgramError
from lowerdeck.serializer.flatbuffer.alignment import check_positive, round_up
from lowerdeck.serializer.flatbuffer.assembly import Assembly
from lowerdeck.serializer.flatbuffer.packing import byte_vector, int_vector
from lowerdeck.serializer.flatbuffer.skeleton import SLOT
from lowerdeck.serializer.flatbuffer.storage import byte_view
from lowerdeck.serializer.flatbuffer.stream import Piece, write_pieces
from lowerdeck.serializer.flatbuffer.wire import EXTERNAL_IDENTIFIER, EXTERNAL_TABLES
from lowerdeck.serializer.pte.field_check import check_external
from lowerdeck.serializer.pte.layout import FileLayout
from lowerdeck.serializer.pte.named_data import NamedDataStoreOutput, TensorLayout
from lowerdeck.serializer.pte.schema import Storage
from lowerdeck.serializer.pte.segments import NamedBlob, SegmentPlan, SegmentPlanner

HEADER_MAGIC = b"FH01"
HEADER_LENGTH = 40
HEADER_STRUCT = struct.Struct("<4sIQQQQ")
_INSERTED = 48


@dataclass(slots=True)
class ExternalEntry:
    """One key of a `.ptd` file.

    Attributes:
        data: The bytes.
        tensor_layout: Type and shape of a tensor; None for a blob that only a delegate reads.
        alignment: The bytes start at a multiple of this many bytes of the file.
    """

    data: Storage
    tensor_layout: TensorLayout | None = None
    alignment: int = 1


@dataclass(slots=True)
class ExternalData:
    """What one `.ptd` file holds.

    Attributes:
        entries: The entries by their keys.
        segment_alignment: Each distinct blob starts at a multiple of this many bytes.
        version: Version of the schema; 0.
    """

    entries: dict[str, ExternalEntry] = field(default_factory=dict)
    segment_alignment: int = 128
    version: int = 0


def external_data(output: NamedDataStoreOutput) -> dict[str, ExternalData]:
    """Return what a store keeps outside the program, by tag (the stem of the `.ptd` file).

    Args:
        output: What :meth:`NamedDataStore.get_named_data_store_output` returned.
    """
    return {
        tag: ExternalData(
            {
                key: ExternalEntry(
                    output.buffers[entry.buffer_index], entry.tensor_layout, entry.alignment
                )
                for key, entry in entries.items()
            }
        )
        for tag, entries in output.external_data.items()
    }


def serialize_ptd(data: ExternalData | Mapping[str, ExternalEntry]) -> bytes:
    """Return external data as the bytes of a `.ptd` file.

    Args:
        data: The data, or only the entries.

    Returns:
        The file.

    Raises:
        ProgramError: An entry or an alignment cannot be written.

    Example:
        >>> from lowerdeck.serializer import ExternalEntry, deserialize_ptd
        >>> file = serialize_ptd({"weight": ExternalEntry(b"1234")})
        >>> bytes(deserialize_ptd(file).entries["weight"].data)
        b'1234'
    """
    return b"".join(ptd_pieces(data))


def write_ptd(
    data: ExternalData | Mapping[str, ExternalEntry],
    path_or_file: str | os.PathLike[str] | BinaryIO,
) -> int:
    """Write external data to a `.ptd` file, streaming them, and return the size in bytes.

    A path is written under a temporary name beside it and then renamed.

    Args:
        data: The data, or only the entries.
        path_or_file: Where to write: a path, or a file open for writing bytes.

    Returns:
        The number of bytes written.

    Raises:
        ProgramError: An entry or an alignment cannot be written; nothing was touched.
        OSError: The file cannot be written; the old one is as it was.
    """
    return write_pieces(ptd_pieces(data), path_or_file)


def ptd_pieces(data: ExternalData | Mapping[str, ExternalEntry]) -> Iterator[Piece]:
    """Return an iterator over the bytes of a `.ptd` file, no blob copied.

    Everything is planned and checked before the first piece comes.

    Args:
        data: The data, or only the entries.

    Raises:
        ProgramError: An entry or an alignment cannot be written.
    """
    if not isinstance(data, ExternalData):
        if not isinstance(data, Mapping):
            raise ProgramError(
                f"found a {type(data).__name__}, expected ExternalData or a dict of entries"
            )
        data = ExternalData(dict(data))
    check_external(data)
    plan = _plan(data)
    pieces = _encode(data, plan)
    size = sum(len(piece) for piece in pieces)
    base = round_up(size, plan.base_alignment)
    header = HEADER_STRUCT.pack(
        HEADER_MAGIC, HEADER_LENGTH, _INSERTED, size - _INSERTED, base, plan.end
    )
    # The header tells sizes that are known only now; its bytes were left free by `_encode`.
    head = bytearray(pieces[0])
    head[8 : 8 + HEADER_LENGTH] = header
    pieces[0] = head
    pieces.append(b"\0" * (base - size))
    return plan.stream(pieces)


def _plan(data: ExternalData) -> SegmentPlan:
    check_positive(data.segment_alignment, "segment_alignment")
    blobs = []
    for key, entry in data.entries.items():
        check_positive(entry.alignment, f"alignment of external data {key!r}")
        view = byte_view(entry.data, f"external data {key!r}")
        blobs.append(NamedBlob(key, view, entry.alignment))
    planner = SegmentPlanner(FileLayout(data.segment_alignment), blobs)
    for blob in blobs:
        planner.add_named(blob)
    return planner.plan


def _encode(data: ExternalData, plan: SegmentPlan) -> list[Piece]:
    assembly = Assembly(EXTERNAL_TABLES, start=8 + _INSERTED, blob_alignment=4)
    skeleton, words = assembly.skeleton, assembly.words
    root = skeleton.table(
        "FlatTensor", {"version": data.version, "segments": SLOT, "named_data": SLOT}
    )
    position, slots = skeleton.vector(len(plan.segments))
    skeleton.patch(root["segments"], position)
    for slot, segment in zip(slots, plan.segments, strict=True):
        sizes = {"offset": segment.offset, "size": segment.size}
        skeleton.patch(slot, skeleton.table("DataSegment", sizes)[""])
    position, slots = skeleton.vector(len(plan.named))
    skeleton.patch(root["named_data"], position)
    for slot, (key, number) in zip(slots, plan.named, strict=True):
        layout = data.entries[key].tensor_layout
        table = skeleton.table(
            "NamedData",
            {
                "key": words.add_string(key),
                "segment_index": number,
                "tensor_layout": None if layout is None else SLOT,
            },
        )
        skeleton.patch(slot, table[""])
        if layout is not None:
            try:
                fields = {
                    "scalar_type": layout.scalar_type,
                    "sizes": words.add(int_vector(layout.sizes)),
                    "dim_order": words.add(byte_vector(layout.dim_order)),
                }
            except ProgramError as error:
                raise ProgramError(f"external data {key!r}: {error}") from error
            skeleton.patch(table["tensor_layout"], skeleton.table("TensorLayout", fields)[""])
    head = struct.pack("<I4s", root[""], EXTERNAL_IDENTIFIER).ljust(8 + _INSERTED, b"\0")
    return assembly.finish(head)
