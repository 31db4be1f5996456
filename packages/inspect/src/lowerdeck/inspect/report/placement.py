"""Offsets of the parts of a program in its file."""

from __future__ import annotations

from lowerdeck.inspect.report.file_map import Placement, Section
from lowerdeck.serializer import DataLocation, PteFile


def placement_of(file: PteFile) -> Placement:
    """Return the offset of each part of an open file, from the start of the file.

    Raises:
        FormatError: The tables with the offsets are malformed.
    """
    base = file.header.segment_base_offset if file.header is not None else 0
    starts = [base + segment.offset for segment in file.segments]
    constants = file.constant_segment
    state = file.mutable_data_segments[:1]
    delegates = _delegate_segments(file)
    named = file.named_data_segments
    labels = {
        index: ("named", f"named data {number}")
        for number, index in reversed(list(enumerate(named)))
    }
    labels |= {index: ("delegate", f"delegate {number}") for index, number in delegates.items()}
    for entry in state:
        labels[entry.segment_index] = ("state", "initial state")
    if constants is not None:
        labels[constants.segment_index] = ("constants", "constants")
    sections = [Section("program", "program", 0, file.program_size)]
    for index, segment in enumerate(file.segments):
        kind, label = labels.get(index, ("unused", f"segment {index}, unused"))
        if segment.size:
            sections.append(Section(kind, label, starts[index], segment.size))
    return Placement(
        len(file.data),
        sections,
        _file_offsets(starts, constants.segment_index, constants.offsets) if constants else [],
        _file_offsets(starts, state[0].segment_index, state[0].offsets) if state else [],
        {number: starts[index] for index, number in delegates.items()},
        [starts[index] for index in named],
    )


def _file_offsets(starts: list[int], segment: int, offsets: list[int]) -> list[int]:
    # The official writer refers to a missing segment if there is no data.
    return [starts[segment] + offset for offset in offsets] if segment < len(starts) else []


def _delegate_segments(file: PteFile) -> dict[int, int]:
    """Return the index in ``backend_delegate_data`` of each delegate segment."""
    segments: dict[int, int] = {}
    for entry in file.delegates:
        if entry.location is DataLocation.SEGMENT:
            segments.setdefault(entry.index, len(segments))
    inline = len(file.backend_delegate_data) - len(segments)
    return {index: inline + number for index, number in segments.items()}
