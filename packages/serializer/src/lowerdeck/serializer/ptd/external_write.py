"""Write external data to `.ptd` files (FlatTensor, ``FT01``).

A `.ptd` begins like a `.pte`, but its header is mandatory and gives the FlatBuffer's size
differently::

    8   "FH01"
    12  u32  length of this header, at least 40; we write 40
    16  u64  bytes inserted before the rest of the FlatBuffer: 48
    24  u64  size of the FlatBuffer without those bytes
    32  u64  offset of the first segment from the start of the file
    40  u64  bytes from that offset to the end of the last segment
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import BinaryIO

from lowerdeck.serializer.errors import ProgramError
from lowerdeck.serializer.escaping import shown
from lowerdeck.serializer.flatbuffer.alignment import check_positive, round_up
from lowerdeck.serializer.flatbuffer.field_check import first_problem, refuse
from lowerdeck.serializer.flatbuffer.storage import byte_view
from lowerdeck.serializer.flatbuffer.stream import Piece, write_pieces
from lowerdeck.serializer.flatbuffer.wire import (
    EXTERNAL_IDENTIFIER,
    Field,
    Format,
    parse_fields,
    parse_schema,
)
from lowerdeck.serializer.flatbuffer.writer import UNWRITABLE, Writer
from lowerdeck.serializer.pte.enums import ScalarType
from lowerdeck.serializer.pte.layout import FileLayout
from lowerdeck.serializer.pte.named_data import NamedDataStoreOutput, TensorLayout
from lowerdeck.serializer.pte.schema import DataSegment, Storage
from lowerdeck.serializer.pte.segments import NamedBlob, SegmentPlan, SegmentPlanner

HEADER_MAGIC = b"FH01"
HEADER_LENGTH = 40
HEADER_STRUCT = struct.Struct("<4sIQQQQ")
_INSERTED = 48


@dataclass(slots=True)
class ExternalEntry:
    """One key of a `.ptd` file.

    Attributes:
        tensor_layout: Type and shape of a tensor; None for a blob that only a delegate reads.
        alignment: Alignment in the file, in bytes.
    """

    data: Storage
    tensor_layout: TensorLayout | None = None
    alignment: int = 1


@dataclass(slots=True)
class ExternalData:
    """Contents of one `.ptd` file.

    Attributes:
        entries: The entries by their keys.
        segment_alignment: Alignment of each distinct blob.
        version: Version of the schema; 0.
    """

    entries: dict[str, ExternalEntry] = field(default_factory=dict)
    segment_alignment: int = 128
    version: int = 0


EXTERNAL_FORMAT = parse_schema(
    "flat_tensor.fbs",
    {kind.__name__: kind for kind in (DataSegment, TensorLayout, ScalarType)},
)
"""The tables of a `.ptd` file; the root is ``FlatTensor``."""
_FIELDS = Format(
    {
        "Entry": (
            Field("key", "str", is_required=True),
            Field("entry", "ExternalEntry", is_required=True),
        ),
        "ExternalEntry": parse_fields("data:bytes tensor_layout:TensorLayout alignment:i64"),
        "TensorLayout": EXTERNAL_FORMAT.tables["TensorLayout"],
    },
    classes={**EXTERNAL_FORMAT.classes, "ExternalEntry": ExternalEntry},
)


def external_data(output: NamedDataStoreOutput) -> dict[str, ExternalData]:
    """Return the external data of a store, keyed by tag (the stem of the `.ptd` file)."""
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
        data: The external data, or a dict of its entries.

    Raises:
        ProgramError: An entry or an alignment is invalid.

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

    A path is written as a temporary file in the same folder and then renamed.

    Args:
        data: The external data, or a dict of its entries.
        path_or_file: A path, or a file opened in binary mode.

    Raises:
        ProgramError: An entry or an alignment is invalid; no file was changed.
        OSError: The file cannot be written; an existing file at the path is unchanged.
    """
    return write_pieces(ptd_pieces(data), path_or_file)


def ptd_pieces(data: ExternalData | Mapping[str, ExternalEntry]) -> Iterator[Piece]:
    """Return an iterator over the bytes of a `.ptd` file without copying blobs.

    The layout is computed and checked before the first piece is yielded.

    Args:
        data: The external data, or a dict of its entries.

    Raises:
        ProgramError: An entry or an alignment is invalid.
    """
    if not isinstance(data, ExternalData):
        if not isinstance(data, Mapping):
            raise ProgramError(
                f"found a {type(data).__name__}, expected ExternalData or a dict of entries"
            )
        data = ExternalData(dict(data))
    if not isinstance(data.entries, dict):
        raise ProgramError(f"entries: found {shown(data.entries)}, expected a dict of entries")
    tables: dict[str, object] = {"version": data.version, "segments": [], "named_data": []}
    try:
        plan = _plan(data)
        tables["segments"] = plan.segments
        tables["named_data"] = [
            {
                "key": key,
                "segment_index": number,
                "tensor_layout": data.entries[key].tensor_layout,
            }
            for key, number in plan.named
        ]
        writer = Writer(EXTERNAL_FORMAT)
        pieces = writer.finish("FlatTensor", tables, EXTERNAL_IDENTIFIER, inserted=_INSERTED)
    except UNWRITABLE as error:
        for key, entry in data.entries.items():
            problem = first_problem(_FIELDS, {"key": key, "entry": entry}, "Entry")
            if problem:
                raise ProgramError(f"entries: external data {shown(key)}{problem}") from error
        refuse(EXTERNAL_FORMAT, tables, "FlatTensor", error)
    size = sum(len(piece) for piece in pieces)
    base = round_up(size, plan.base_alignment)
    header = HEADER_STRUCT.pack(
        HEADER_MAGIC, HEADER_LENGTH, _INSERTED, size - _INSERTED, base, plan.end
    )
    # The header records sizes that are known only now.
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
