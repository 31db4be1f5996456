"""ETDump files written."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from typing import BinaryIO

from lowerdeck.serializer.errors import ProgramError
from lowerdeck.serializer.etdump.events import ProfileEvent, RunData
from lowerdeck.serializer.flatbuffer.assembly import Assembly
from lowerdeck.serializer.flatbuffer.packing import byte_vector
from lowerdeck.serializer.flatbuffer.skeleton import SLOT
from lowerdeck.serializer.flatbuffer.stream import Piece, write_pieces
from lowerdeck.serializer.flatbuffer.wire import ETDUMP_IDENTIFIER, ETDUMP_TABLES

_PREFIX = 4
"""The file begins with its own size, which no offset counts."""


def serialize_etdump(runs: Sequence[RunData]) -> bytes:
    """Return runs as the bytes of an ETDump file.

    Args:
        runs: What happened in each run.

    Raises:
        ProgramError: It cannot be written; the message names the field.

    Example:
        >>> file = serialize_etdump([RunData(events=[ProfileEvent("Method::execute", 0, 1200)])])
        >>> file[8:12]
        b'ED00'
    """
    return b"".join(_pieces(runs))


def write_etdump(runs: Sequence[RunData], path_or_file: str | os.PathLike[str] | BinaryIO) -> int:
    """Write runs to an ETDump file, and return its size in bytes.

    A path is written under a temporary name beside it and then renamed.

    Args:
        runs: What happened in each run.
        path_or_file: Where to write: a path, by custom ending in ``.etdp``, or a file open for
            writing bytes.

    Raises:
        ProgramError: It cannot be written; nothing was touched.
        OSError: The file cannot be written; the old one is as it was.
    """
    return write_pieces(iter(_pieces(runs)), path_or_file)


def _pieces(runs: Sequence[RunData]) -> list[Piece]:
    assembly = Assembly(ETDUMP_TABLES, start=_PREFIX + 8, blob_alignment=4)
    skeleton = assembly.skeleton
    root = skeleton.table("ETDump", {"run_data": SLOT})
    position, slots = skeleton.vector(len(runs))
    skeleton.patch(root["run_data"], position)
    for number, (slot, run) in enumerate(zip(slots, runs, strict=True)):
        _check_number(f"run_data[{number}].bundled_input_index", run.bundled_input_index)
        table = skeleton.table(
            "RunData",
            {
                "name": assembly.words.add_string(run.name),
                "bundled_input_index": run.bundled_input_index,
                "events": SLOT,
            },
            zeros=True,
        )
        skeleton.patch(slot, table[""])
        position, events = skeleton.vector(len(run.events))
        skeleton.patch(table["events"], position)
        for index, (at, event) in enumerate(zip(events, run.events, strict=True)):
            _add_event(assembly, at, event, f"run_data[{number}].events[{index}]")
    pieces = assembly.finish(struct.pack("<II4s", 0, root[""] - _PREFIX, ETDUMP_IDENTIFIER))
    size = sum(map(len, pieces)) - _PREFIX
    return [size.to_bytes(_PREFIX, "little"), memoryview(pieces[0])[_PREFIX:], *pieces[1:]]


def _add_event(assembly: Assembly, slot: int, event: ProfileEvent, where: str) -> None:
    for name in ("chain_index", "instruction_id"):
        _check_number(f"{where}.{name}", getattr(event, name))
    for name in ("start_time", "end_time"):
        _check_number(f"{where}.{name}", getattr(event, name), 0, 1 << 64)
    identifier = event.delegate_debug_id
    fields: dict[str, object] = {
        "name": assembly.words.add_string(event.name),
        "chain_index": event.chain_index,
        "instruction_id": event.instruction_id,
        "start_time": event.start_time,
        "end_time": event.end_time,
    }
    if isinstance(identifier, str):
        fields["delegate_debug_id_str"] = assembly.words.add_string(identifier)
    elif identifier is not None:
        _check_number(f"{where}.delegate_debug_id", identifier)
        fields["delegate_debug_id_int"] = identifier
    if event.delegate_debug_metadata:
        metadata = byte_vector(event.delegate_debug_metadata)
        fields["delegate_debug_metadata"] = assembly.words.add(metadata)
    table = assembly.skeleton.table("Event", {"profile_event": SLOT})
    assembly.skeleton.patch(slot, table[""])
    written = assembly.skeleton.table("ProfileEvent", fields, zeros=True)
    assembly.skeleton.patch(table["profile_event"], written[""])


def _check_number(
    where: str, value: object, smallest: int = -(1 << 31), past: int = 1 << 31
) -> None:
    if not isinstance(value, int) or not smallest <= value < past:
        raise ProgramError(
            f"{where}: found {value!r}, expected an integer from {smallest} to {past - 1}"
        )
