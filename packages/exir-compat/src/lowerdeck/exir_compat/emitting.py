"""Emission results under the names that exir's emitter gives them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lowerdeck.emitter import EmittedProgram
from lowerdeck.exir_compat.exir_schema import (
    as_bytes,
    in_exirs_classes,
)


@dataclass(slots=True)
class EmitterOutput:
    """What was emitted, as exir's tools ask for it.

    Attributes:
        program: The program; in exir's classes where they have been imported.
        debug_handle_map: The debug handle of each instruction, by method and index; of a call of
            a delegate a list, of what is inside.
        method_to_delegate_debug_id_map: Debug maps of delegate calls, by method and
            index of its instruction.
        instruction_id_to_num_outs_map: How many results each delegate call gives, by method and
            index of its instruction.
        mutable_data: Initial values of state, of which entry 0 is reserved; None without state
            that has one.
        external_constant_buffer: The bytes of constants outside of the program.
        external_constant_map: For each file the index of each constant in that list, by name.
    """

    program: Any
    debug_handle_map: dict[str, dict[int, int | list[int]]]
    method_to_delegate_debug_id_map: dict[str, dict[int, dict[str, Any]]]
    instruction_id_to_num_outs_map: dict[str, dict[int, int]]
    mutable_data: list[Any] | None
    external_constant_buffer: list[bytes]
    external_constant_map: dict[str, dict[str, int]] | None


def emitter_output(emitted: EmittedProgram, program: Any) -> EmitterOutput:
    """Return what was emitted, as exir's emitter returns it.

    Args:
        program: Its program, in exir's classes where these are loaded.
    """
    outside, names = _outside(emitted)
    state = emitted.program.mutable_data
    delegates = emitted.delegate_debug_maps
    return EmitterOutput(
        program=program,
        debug_handle_map={name: _handles(emitted, name) for name in emitted.debug_handle_map},
        method_to_delegate_debug_id_map={
            method: {
                index: {"name": source.backend_id, "delegate_map": dict(source.debug_handle_map)}
                for index, source in calls.items()
            }
            for method, calls in delegates.items()
        },
        instruction_id_to_num_outs_map={
            method: {index: emitted.debug_handle_map[method][index].results for index in calls}
            for method, calls in delegates.items()
        },
        mutable_data=in_exirs_classes(state) if len(state) > 1 else None,
        external_constant_buffer=outside,
        external_constant_map=names,
    )


def _handles(emitted: EmittedProgram, method: str) -> dict[int, int | list[int]]:
    """Return the debug handle of each instruction of a method that has some, by its index."""
    calls = emitted.delegate_debug_maps.get(method, {})
    handles: dict[int, int | list[int]] = {}
    for index, source in emitted.debug_handle_map[method].items():
        if index in calls:
            handles[index] = sorted(calls[index].sources) or list(source.handles)
        elif source.handles:
            handles[index] = source.handles[0]
    return handles


def _outside(emitted: EmittedProgram) -> tuple[list[bytes], dict[str, dict[str, int]]]:
    """Return the bytes that go to other files, each once, and their indices by file and name."""
    kept = emitted.named_data.get_named_data_store_output()
    indices: dict[int, int] = {}
    names = {
        tag: {
            key: indices.setdefault(entry.buffer_index, len(indices))
            for key, entry in entries.items()
        }
        for tag, entries in kept.external_data.items()
    }
    return [as_bytes(kept.buffers[index]) for index in indices], names
