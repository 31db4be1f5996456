"""Emission results in the form of exir's emitter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lowerdeck.emitter import EmittedProgram
from lowerdeck.exir_compat.exir_schema import as_bytes, to_exir_classes


@dataclass(slots=True)
class EmitterOutput:
    """Emission result in the form that exir's tools read.

    Attributes:
        program: The program, in exir's classes if exir is imported.
        debug_handle_map: Debug handle of each instruction, by method and index; for delegate
            calls, the list of the handles in the delegate.
        method_to_delegate_debug_id_map: Debug maps of delegate calls, by method and instruction
            index.
        instruction_id_to_num_outs_map: Number of results of delegate calls, by method and
            instruction index.
        mutable_data: Initial values of state, after a reserved entry 0; None if there is no state.
        external_constant_buffer: Bytes of external constants.
        external_constant_map: Index in ``external_constant_buffer`` of each external constant, by
            file and name.
    """

    program: Any
    debug_handle_map: dict[str, dict[int, int | list[int]]]
    method_to_delegate_debug_id_map: dict[str, dict[int, dict[str, Any]]]
    instruction_id_to_num_outs_map: dict[str, dict[int, int]]
    mutable_data: list[Any] | None
    external_constant_buffer: list[bytes]
    external_constant_map: dict[str, dict[str, int]] | None


def emitter_output(emitted: EmittedProgram, program: Any) -> EmitterOutput:
    """Return the emission result in the form of exir's emitter.

    Args:
        program: The program, in exir's classes if exir is imported.
    """
    external, names = _external_constants(emitted)
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
        mutable_data=to_exir_classes(state) if len(state) > 1 else None,
        external_constant_buffer=external,
        external_constant_map=names,
    )


def _handles(emitted: EmittedProgram, method: str) -> dict[int, int | list[int]]:
    """Return debug handles of a method's instructions by index, without empty ones."""
    calls = emitted.delegate_debug_maps.get(method, {})
    handles: dict[int, int | list[int]] = {}
    for index, source in emitted.debug_handle_map[method].items():
        if index in calls:
            handles[index] = sorted(calls[index].sources) or list(source.handles)
        elif source.handles:
            handles[index] = source.handles[0]
    return handles


def _external_constants(emitted: EmittedProgram) -> tuple[list[bytes], dict[str, dict[str, int]]]:
    """Return the distinct external constants, and their indices by file and name."""
    store = emitted.named_data.get_named_data_store_output()
    indices: dict[int, int] = {}
    names = {
        tag: {
            key: indices.setdefault(entry.buffer_index, len(indices))
            for key, entry in entries.items()
        }
        for tag, entries in store.external_data.items()
    }
    return [as_bytes(store.buffers[index]) for index in indices], names
