"""Segments of a file in order, and its stored data with sizes and offsets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lowerdeck.inspect.report.embed import clip, number
from lowerdeck.inspect.report.lifetimes import callee, steps
from lowerdeck.inspect.report.values import tensor_text
from lowerdeck.serializer import (
    DataLocation,
    DelegateCall,
    ExecutionPlan,
    KernelCall,
    Program,
    PteFile,
    Storage,
    Tensor,
    storage_size,
)


class Section(NamedTuple):
    """A byte range of the file.

    Attributes:
        kind: ``program``, ``constants``, ``state``, ``delegate``, ``named`` or ``unused``.
        label: Name of the section in the page.
        offset: First byte, counted from the start of the file.
    """

    kind: str
    label: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Offsets of the parts of a program in its file.

    Attributes:
        file_size: Length of the file.
        sections: The program and each segment, by offset.
        constants: Offset of each constant in the file, including the reserved first entry.
        state: Offset of each initial value of a mutable buffer, including the reserved first
            entry.
        delegates: Offset of each delegate that is a segment, by index.
        named: Offset of each entry of named data.
    """

    file_size: int
    sections: list[Section] = field(default_factory=list)
    constants: list[int] = field(default_factory=list)
    state: list[int] = field(default_factory=list)
    delegates: dict[int, int] = field(default_factory=dict)
    named: list[int] = field(default_factory=list)


def sections_entry(placement: Placement) -> list[dict[str, Any]]:
    """Return the sections of a file by offset, including the padding between them."""
    sections = []
    end = 0
    for section in sorted(placement.sections, key=lambda s: (s.offset, -s.nbytes)):
        if section.offset > end:
            sections.append(Section("unused", "padding", end, section.offset - end))
        sections.append(section)
        end = max(end, section.offset + section.nbytes)
    if placement.file_size > end:
        sections.append(Section("unused", "after the last part", end, placement.file_size - end))
    return [
        {
            "kind": section.kind,
            "label": clip(section.label),
            "offset": number(section.offset),
            "nbytes": number(section.nbytes),
        }
        for section in sections
    ]


def stored_entry(program: Program, placement: Placement | None) -> list[dict[str, Any]]:
    """Return every constant, initial value, delegate and named blob, largest first.

    Args:
        placement: Offsets in the file; None for a program without a file.
    """
    offsets: dict[str, Mapping[int, int]] = {}
    if placement is not None:
        offsets = {
            "constants": dict(enumerate(placement.constants)),
            "state": dict(enumerate(placement.state)),
            "delegate": placement.delegates,
            "named": dict(enumerate(placement.named)),
        }
    entries = []
    for item in all_stored(program):
        offsets_of_kind = offsets.get(item.kind, {})
        entries.append(
            {
                "kind": item.kind,
                "index": item.index,
                "name": clip(item.label),
                "what": item.what,
                "nbytes": storage_size(item.storage),
                "offset": number(offsets_of_kind[item.index])
                if item.index in offsets_of_kind
                else None,
            }
        )
    return sorted(entries, key=lambda entry: (-entry["nbytes"], entry["kind"], entry["index"]))


@dataclass(frozen=True, slots=True)
class Stored:
    """One constant, initial value, delegate or named blob.

    Attributes:
        kind: ``constants``, ``state``, ``delegate`` or ``named``.
        index: Index among the entries of its kind.
        name: Name of the parameter or buffer, backend, or key; None for a nameless constant.
        what: Type and first reader.
        tensor: The first tensor that has this constant or initial value.
    """

    kind: str
    index: int
    name: str | None
    what: str
    storage: Storage
    tensor: Tensor | None = None

    @property
    def label(self) -> str:
        """Return the name, or kind and index if there is no name."""
        return self.name if self.name is not None else f"{self.kind} {self.index}"


def all_stored(program: Program) -> Iterator[Stored]:
    """Yield all stored data of a program, in the order of its tables."""
    constants, state = _users_by_buffer(program)
    for kind, users, buffers in (
        ("constants", constants, program.constant_buffer),
        ("state", state, program.mutable_data),
    ):
        for index, buffer in enumerate(buffers[1:], start=1):
            name, usage, tensor = users.get(index, (None, "used by no tensor", None))
            yield Stored(kind, index, name, usage, buffer.storage, tensor)
    backends = {
        delegate.processed.index: delegate.id
        for plan in program.execution_plan
        for delegate in plan.delegates
    }
    for index, blob in enumerate(program.backend_delegate_data):
        name = backends.get(index, "used by no method")
        yield Stored("delegate", index, name, f"delegate {index}", blob.data)
    for index, named in enumerate(program.named_data):
        yield Stored("named", index, named.key, "named data", named.data)


_Users = dict[int, tuple[str | None, str, Tensor | None]]


def _users_by_buffer(program: Program) -> tuple[_Users, _Users]:
    """Return name and description of each constant and each initial value, by index."""
    constants: _Users = {}
    state: _Users = {}
    for plan in program.execution_plan:
        readers = _first_readers(plan)
        for index, evalue in enumerate(plan.values):
            tensor = evalue.val
            if not isinstance(tensor, Tensor) or not tensor.data_buffer_idx:
                continue
            where = constants if tensor.allocation_info is None else state
            index_of = tensor.data_buffer_idx
            name, usage, first = where.get(index_of, (None, "", None))
            reader = f", read by {readers[index]}" if index in readers else ""
            extra = tensor.extra_tensor_info
            own = extra.fully_qualified_name if extra is not None else None
            text = usage or f"{tensor_text(tensor)}{reader}"
            where[index_of] = (name or own, text, first or tensor)
    return constants, state


def _first_readers(plan: ExecutionPlan) -> dict[int, str]:
    """Return the first kernel or delegate that uses each value."""
    readers: dict[int, str] = {}
    for time, step in enumerate(steps(plan)):
        name = callee(plan, step)
        for arg in step.args if isinstance(step, KernelCall | DelegateCall) else ():
            if arg not in readers:
                readers[arg] = clip(f"{name} at {time}")
    return readers


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
