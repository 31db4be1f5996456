"""ETDump files: times of events in runs, for ExecuTorch's ``Inspector``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import BinaryIO

from lowerdeck.serializer.flatbuffer.field_check import refuse
from lowerdeck.serializer.flatbuffer.stream import Piece, write_pieces
from lowerdeck.serializer.flatbuffer.wire import ETDUMP_FORMAT, ETDUMP_IDENTIFIER
from lowerdeck.serializer.flatbuffer.writer import UNWRITABLE, Writer


@dataclass(frozen=True, slots=True)
class ProfileEvent:
    """One timed event.

    Attributes:
        name: ``native_call_`` and the operator for a kernel, ``DELEGATE_CALL`` for a delegate,
            ``Method::execute`` for a whole call, as in ExecuTorch's runtime.
        start_time: Start in nanoseconds, from an arbitrary origin.
        chain_index: Index of the chain.
        instruction_id: Index of the instruction in the chain; -1 for other events.
        delegate_debug_id: Debug identifier of an event inside a delegate, else None.
        delegate_debug_metadata: The backend's metadata of this event.
    """

    name: str
    start_time: int
    end_time: int
    chain_index: int = 0
    instruction_id: int = -1
    delegate_debug_id: int | str | None = None
    delegate_debug_metadata: bytes = b""


@dataclass(frozen=True, slots=True)
class RunData:
    """One run, such as one call of a method.

    Attributes:
        name: Name shared by related runs; ExecuTorch's runtime uses ``Execute``.
        events: The events of the run, ordered by end time.
        bundled_input_index: Index of the test case, -1 for none.
    """

    name: str = "Execute"
    events: list[ProfileEvent] = field(default_factory=list)
    bundled_input_index: int = -1


_PREFIX = 4
"""Bytes of the size prefix, which offsets do not count."""


def serialize_etdump(runs: Sequence[RunData]) -> bytes:
    """Return runs as the bytes of an ETDump file.

    Args:
        runs: The events of each run.

    Raises:
        ProgramError: A run is invalid; the message names the field.

    Example:
        >>> file = serialize_etdump([RunData(events=[ProfileEvent("Method::execute", 0, 1200)])])
        >>> file[8:12]
        b'ED00'
    """
    return b"".join(_pieces(runs))


def write_etdump(runs: Sequence[RunData], path_or_file: str | os.PathLike[str] | BinaryIO) -> int:
    """Write runs to an ETDump file, and return its size in bytes.

    A path is written as a temporary file in the same folder and then renamed.

    Args:
        runs: The events of each run.
        path_or_file: A path, by convention ending in ``.etdp``, or a file opened in binary mode.

    Raises:
        ProgramError: A run is invalid; no file was changed.
        OSError: The file cannot be written; an existing file is unchanged.
    """
    return write_pieces(iter(_pieces(runs)), path_or_file)


def _pieces(runs: Sequence[RunData]) -> list[Piece]:
    root = {
        "run_data": [
            {
                "name": run.name,
                "bundled_input_index": run.bundled_input_index,
                "events": [{"profile_event": _event_fields(event)} for event in run.events],
            }
            for run in runs
        ]
    }
    try:
        return Writer(ETDUMP_FORMAT).finish("ETDump", root, ETDUMP_IDENTIFIER, prefix=_PREFIX)
    except UNWRITABLE as error:
        refuse(ETDUMP_FORMAT, root, "ETDump", error)


def _event_fields(event: ProfileEvent) -> dict[str, object]:
    identifier = event.delegate_debug_id
    is_text = isinstance(identifier, str)
    return {
        "name": event.name,
        "chain_index": event.chain_index,
        "instruction_id": event.instruction_id,
        "delegate_debug_id_int": -1 if is_text or identifier is None else identifier,
        "delegate_debug_id_str": identifier if is_text else None,
        "delegate_debug_metadata": event.delegate_debug_metadata or None,
        "start_time": event.start_time,
        "end_time": event.end_time,
    }
