"""What fills a file: its segments in order, and every stored thing with its size and place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lowerdeck.serializer.report.delegates import storage_size
from lowerdeck.serializer.report.embed import clip, number
from lowerdeck.serializer.report.values import tensor_text
from lowerdeck.serializer.schema import Program, Tensor


@dataclass(frozen=True, slots=True)
class Section:
    """A run of bytes of the file.

    Attributes:
        kind: ``program``, ``constants``, ``state``, ``delegate``, ``named`` or ``unused``.
        label: What a person calls it.
        offset: First byte, counted from the start of the file.
        nbytes: Its length.
    """

    kind: str
    label: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the parts of a program stand in the file that holds it.

    Attributes:
        file_size: Length of the file.
        sections: The program and each segment, by offset.
        constants: First byte of each constant in the file; the first entry is the reserved one.
        state: The same for initial values of mutable buffers.
        delegates: The same for those bytes of delegates that are segments, by index.
        named: The same for named data.
    """

    file_size: int
    sections: list[Section] = field(default_factory=list)
    constants: list[int] = field(default_factory=list)
    state: list[int] = field(default_factory=list)
    delegates: dict[int, int] = field(default_factory=dict)
    named: list[int] = field(default_factory=list)


def sections_entry(placement: Placement) -> list[dict[str, Any]]:
    """Return the sections of a file by offset, with the padding between them made visible.

    Args:
        placement: Where the parts stand.
    """
    shown = []
    end = 0
    for section in sorted(placement.sections, key=lambda s: (s.offset, -s.nbytes)):
        if section.offset > end:
            shown.append(Section("unused", "padding", end, section.offset - end))
        shown.append(section)
        end = max(end, section.offset + section.nbytes)
    if placement.file_size > end:
        shown.append(Section("unused", "after the last part", end, placement.file_size - end))
    return [
        {
            "kind": section.kind,
            "label": clip(section.label),
            "offset": number(section.offset),
            "nbytes": number(section.nbytes),
        }
        for section in shown
    ]


def stored_entry(program: Program, placement: Placement | None) -> list[dict[str, Any]]:
    """Return every constant, initial value, delegate and named blob, largest first.

    Args:
        program: The program that holds them.
        placement: Where they stand in the file; None for a program that is in no file.
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
    for kind, index, name, what, nbytes in _stored(program):
        places = offsets.get(kind, {})
        entries.append(
            {
                "kind": kind,
                "index": index,
                "name": clip(name),
                "what": what,
                "nbytes": nbytes,
                "offset": number(places[index]) if index in places else None,
            }
        )
    return sorted(entries, key=lambda entry: (-entry["nbytes"], entry["kind"], entry["index"]))


def stored_names(program: Program) -> Iterator[tuple[str, int, str]]:
    """Yield kind, index and name of everything that a program stores.

    Args:
        program: The program.
    """
    for kind, index, name, _, _ in _stored(program):
        yield kind, index, name


def _stored(program: Program) -> Iterator[tuple[str, int, str, str, int]]:
    """Yield kind, index, name, type and size of all that holds bytes."""
    constants, state = _tensors_by_buffer(program)
    for kind, tensors, buffers in (
        ("constants", constants, program.constant_buffer),
        ("state", state, program.mutable_data),
    ):
        for index, buffer in enumerate(buffers[1:], start=1):
            users = tensors.get(index, [])
            name = next((known for user in users if (known := _name(user))), f"{kind} {index}")
            what = tensor_text(users[0]) if users else "used by no tensor"
            yield kind, index, name, what, storage_size(buffer.storage)
    backends = {
        delegate.processed.index: delegate.id
        for plan in program.execution_plan
        for delegate in plan.delegates
    }
    for index, blob in enumerate(program.backend_delegate_data):
        name = backends.get(index, "used by no method")
        yield "delegate", index, name, f"delegate {index}", storage_size(blob.data)
    for index, named in enumerate(program.named_data):
        yield "named", index, named.key, "named data", storage_size(named.data)


def _tensors_by_buffer(
    program: Program,
) -> tuple[dict[int, list[Tensor]], dict[int, list[Tensor]]]:
    constants: dict[int, list[Tensor]] = {}
    state: dict[int, list[Tensor]] = {}
    for plan in program.execution_plan:
        for evalue in plan.values:
            tensor = evalue.val
            if isinstance(tensor, Tensor) and tensor.data_buffer_idx > 0:
                where = constants if tensor.allocation_info is None else state
                where.setdefault(tensor.data_buffer_idx, []).append(tensor)
    return constants, state


def _name(tensor: Tensor) -> str | None:
    extra = tensor.extra_tensor_info
    return extra.fully_qualified_name if extra is not None else None
