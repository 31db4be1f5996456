"""Write programs as `.pte` files: compute the layout, then stream the pieces."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import BinaryIO, Unpack

from lowerdeck.serializer.collector import collector_held
from lowerdeck.serializer.errors import NamedDataConflictError, ProgramError
from lowerdeck.serializer.flatbuffer.alignment import check_positive, common_alignment, round_up
from lowerdeck.serializer.flatbuffer.field_check import is_list, refuse
from lowerdeck.serializer.flatbuffer.storage import byte_view, same_bytes
from lowerdeck.serializer.flatbuffer.stream import Piece, write_pieces
from lowerdeck.serializer.flatbuffer.wire import FILE_IDENTIFIER, Format, parse_fields
from lowerdeck.serializer.flatbuffer.writer import UNWRITABLE, Writer
from lowerdeck.serializer.pte.container import (
    HEADER_LENGTH,
    HEADER_START,
    ExtendedHeader,
    inserted_size,
)
from lowerdeck.serializer.pte.enums import DataLocation
from lowerdeck.serializer.pte.layout import FileLayout, LayoutOptions, chosen_layout
from lowerdeck.serializer.pte.named_data import NamedDataStoreOutput
from lowerdeck.serializer.pte.schema import (
    PROGRAM_FORMAT,
    BackendDelegate,
    BackendDelegateDataReference,
    NamedData,
    Program,
)
from lowerdeck.serializer.pte.segments import NamedBlob, SegmentPlan, SegmentPlanner

_LOGICAL = {
    "Program": parse_fields(
        "version:u32 execution_plan:[ExecutionPlan] constant_buffer:[Buffer]"
        " mutable_data:[Buffer] backend_delegate_data:[BackendDelegateInlineData]"
        " named_data:[NamedData]"
    ),
    "NamedData": parse_fields("key:str data:bytes alignment:i64"),
}
_LISTS = [field for field in _LOGICAL["Program"] if field.item]
_PROGRAM_FIELDS = Format(
    {**PROGRAM_FORMAT.tables, **_LOGICAL},
    PROGRAM_FORMAT.unions,
    {**PROGRAM_FORMAT.classes, "Program": Program, "NamedData": NamedData},
)
"""Fields of the in-memory classes; Program and NamedData differ from the tables in the file."""
MIN_FILE_SIZE = 64
"""The runtime reads this many bytes first and fails on shorter files."""


def serialize_pte(
    program: Program,
    *,
    named_data: NamedDataStoreOutput | None = None,
    **layout: Unpack[LayoutOptions],
) -> bytes:
    """Return a program as the bytes of a `.pte` file.

    Args:
        named_data: Named data to add to those of the program.
        **layout: Fields of :class:`FileLayout`; by default those of the source file, if there is
            one.

    Raises:
        ProgramError: The program or an option cannot be written.

    Example:
        >>> from lowerdeck.serializer import ExecutionPlan, Program, deserialize_pte
        >>> data = serialize_pte(Program(execution_plan=[ExecutionPlan("forward")]))
        >>> deserialize_pte(data).execution_plan[0].name
        'forward'
    """
    return b"".join(pte_pieces(program, named_data, layout))


def write_pte(
    program: Program,
    path_or_file: str | os.PathLike[str] | BinaryIO,
    *,
    named_data: NamedDataStoreOutput | None = None,
    **layout: Unpack[LayoutOptions],
) -> int:
    """Write a program to a `.pte` file, streaming its buffers, and return the size in bytes.

    A path is written as a temporary file in the same folder and then renamed, so that a crash
    leaves the old file or the new one.

    Args:
        path_or_file: A path, or a file opened in binary mode.
        **layout: As for :func:`serialize_pte`.

    Raises:
        ProgramError: The program or an option is invalid; no file was changed.
        OSError: The file cannot be written; an existing file at the path is unchanged.
    """
    return write_pieces(pte_pieces(program, named_data, layout), path_or_file)


def pte_pieces(
    program: Program, named_data: NamedDataStoreOutput | None, options: LayoutOptions
) -> Iterator[Piece]:
    """Return an iterator over the bytes of a `.pte` file without copying blobs.

    The layout is computed and checked before the first piece is yielded.

    Raises:
        ProgramError: The program cannot be written.
    """
    untyped: object = program
    if not isinstance(untyped, Program):
        raise ProgramError(f"found a {type(untyped).__name__}, expected a Program")
    layout = chosen_layout(program.layout, options)
    try:
        for field in _LISTS:
            # No later check covers lists that are empty, reserved or unused.
            items = getattr(program, field.name)
            if not is_list(items) or {*map(type, items)} - {_PROGRAM_FIELDS.classes[field.item]}:
                raise TypeError(f"expected a list of {field.item}")
        plan = _plan(program, layout, named_data)
        writer = Writer(PROGRAM_FORMAT, alignment=layout.delegate_alignment)
        inserted = inserted_size(layout) if plan.end else 0
        tables = _file_tables(program, plan, extracted=layout.extract_delegate_segments)
        with collector_held():
            pieces = writer.finish("Program", tables, FILE_IDENTIFIER, inserted=inserted)
    except UNWRITABLE as error:
        refuse(_PROGRAM_FIELDS, program, "Program", error)
    size = sum(len(piece) for piece in pieces)
    if not plan.end:
        pieces.append(b"\0" * (MIN_FILE_SIZE - size))
        return iter(pieces)
    base = round_up(size, plan.base_alignment)
    header = ExtendedHeader(HEADER_LENGTH, size, base, plan.end).pack()
    head = bytearray(pieces[0])
    head[HEADER_START : HEADER_START + HEADER_LENGTH] = header
    pieces[0] = head
    pieces.append(b"\0" * (base - size))
    return plan.stream(pieces)


def _plan(
    program: Program, layout: FileLayout, named_data: NamedDataStoreOutput | None
) -> SegmentPlan:
    named = _named_blobs(program, named_data)
    planner = SegmentPlanner(layout, named)
    planner.add_constants(program.constant_buffer)
    planner.add_mutable(program.mutable_data)
    if layout.extract_delegate_segments:
        # In order of use, which a reader can recover; unused delegates are omitted.
        for index in _delegate_order(program):
            data = program.backend_delegate_data[index].data
            planner.add_delegate(index, byte_view(data, f"backend_delegate_data[{index}]"))
    for blob in named:
        planner.add_named(blob)
    return planner.plan


def _file_tables(program: Program, plan: SegmentPlan, *, extracted: bool) -> dict[str, object]:
    """Return the root table of the file, with buffers replaced by segments."""

    def stored(delegate: BackendDelegate) -> BackendDelegate:
        location, index = DataLocation(delegate.processed.location), delegate.processed.index
        if extracted:
            location, index = DataLocation.SEGMENT, plan.delegates[index]
        return replace(delegate, processed=BackendDelegateDataReference(location, index))

    for method in program.execution_plan:
        if not is_list(method.delegates):
            raise TypeError("expected a list")
    return {
        "version": program.version,
        "execution_plan": [
            replace(method, delegates=list(map(stored, method.delegates)))
            for method in program.execution_plan
        ],
        "constant_buffer": [],
        "backend_delegate_data": [] if extracted else program.backend_delegate_data,
        "segments": plan.segments,
        "constant_segment": plan.constants,
        "mutable_data_segments": [plan.mutable] if plan.mutable else None,
        "named_data": [{"key": key, "segment_index": number} for key, number in plan.named],
    }


def _delegate_order(program: Program) -> list[int]:
    order: dict[int, None] = {}
    count = len(program.backend_delegate_data)
    for method in program.execution_plan:
        for number, delegate in enumerate(method.delegates):
            index = delegate.processed.index
            if not 0 <= index < count:
                raise ProgramError(
                    f"method {method.name!r}.delegates[{number}].processed: found index {index}, "
                    f"expected one of the {count} entries of backend_delegate_data"
                )
            order[index] = None
    return list(order)


def _named_blobs(program: Program, named_data: NamedDataStoreOutput | None) -> list[NamedBlob]:
    blobs: dict[str, NamedBlob] = {}
    entries = [(entry.key, entry.data, entry.alignment) for entry in program.named_data]
    if named_data is not None:
        entries += [
            (key, named_data.buffers[entry.buffer_index], entry.alignment)
            for key, entry in named_data.pte_data.items()
        ]
    for key, data, alignment in entries:
        view = byte_view(data, f"named data {key!r}")
        check_positive(alignment, f"alignment of named data {key!r}")
        earlier = blobs.get(key)
        if earlier is not None and not same_bytes(earlier.view, view):
            raise NamedDataConflictError(
                key, f"{len(view)} bytes", f"{len(earlier.view)} bytes of different content"
            )
        blobs[key] = NamedBlob(
            key, view, common_alignment(alignment, earlier.alignment if earlier else 1)
        )
    return list(blobs.values())
