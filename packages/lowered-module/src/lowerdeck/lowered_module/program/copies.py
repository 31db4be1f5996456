"""Copies of programs with new graphs and shared weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry
from torch.export.graph_signature import ExportGraphSignature
from torch.fx import Graph

from lowerdeck.lowered_module._torch_private import fake_mode_of
from lowerdeck.lowered_module.program.graphs import inputs_of
from lowerdeck.torch_base import copy_graph_module, lazy_clone, renamed_outputs, with_parts


def partitioner_copy(program: ExportedProgram) -> ExportedProgram:
    """Return a copy for a partitioner to tag: new graphs, fake weights, the same constants."""
    values = [(spec.target, node.meta.get("val")) for node, spec in inputs_of(program)]
    mode = fake_mode_of([value for _, value in values])
    if mode is None:
        return shared_copy(program)
    fakes = dict(values)
    state: dict[str, Any] = {}
    for name, tensor in program.state_dict.items():
        fake = fakes.get(name)
        state[name] = mode.from_tensor(tensor, static_shapes=True) if fake is None else fake
    return shared_copy(program, state_dict=state)


def backend_copy(program: ExportedProgram, *, reads_only: bool = False) -> ExportedProgram:
    """Return a copy that a backend may change.

    Its tensors are cloned copy-on-write if torch can do that.

    Args:
        reads_only: Whether the backend changes neither graphs nor tensors. If so, the copy shares
            the graphs, and tensors that torch cannot clone copy-on-write (loaded or mapped).
    """
    take = _clone_if_owned if reads_only else lazy_clone
    state = _each_once(program.state_dict, take)
    constants = _each_once(program.constants, take)
    if reads_only:
        return with_parts(program, state_dict=state, constants=constants)
    return shared_copy(program, state_dict=state, constants=constants)


def shared_copy(program: ExportedProgram, **parts: Any) -> ExportedProgram:
    """Return a copy with new graphs and the same tensors.

    Args:
        **parts: Parts that replace the program's.
    """
    signature = program.graph_signature
    own: dict[str, Any] = {
        "graph_module": copy_graph_module(program.graph_module),
        "graph_signature": ExportGraphSignature(
            list(signature.input_specs), list(signature.output_specs)
        ),
        "state_dict": dict(program.state_dict),
        "constants": dict(program.constants),
        "range_constraints": dict(program.range_constraints),
        "module_call_graph": [
            ModuleCallEntry(entry.fqn, entry.signature) for entry in program.module_call_graph
        ],
        "verifiers": list(program.verifiers),
        "guards_code": [],
    }
    return with_parts(program, **(own | parts))


def rewritten(
    program: ExportedProgram, *rewrites: Callable[[Graph], bool], in_place: bool = False
) -> ExportedProgram:
    """Return a program whose outermost graph was rewritten, or ``program`` if nothing changed.

    Args:
        *rewrites: Each rewrites a graph in place, in turn; returns whether anything changed.
        in_place: Whether to rewrite the program's graph instead of a copy.
    """
    copied = program.graph_module if in_place else copy_graph_module(program.graph_module)
    changes = [rewrite(copied.graph) for rewrite in rewrites]
    if not any(changes):
        return program
    copied.recompile()
    signature = renamed_outputs(program.graph_signature, copied.graph)
    return with_parts(program, graph_module=copied, graph_signature=signature)


def _clone_if_owned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if _has_foreign_memory(tensor) else lazy_clone(tensor)


def _has_foreign_memory(tensor: torch.Tensor) -> bool:
    """Return whether torch does not own a tensor's memory, so cannot clone it copy-on-write."""
    try:
        return not tensor.untyped_storage().resizable()
    except (NotImplementedError, RuntimeError):
        return True  # no storage


def _each_once(
    values: dict[str, Any], copy: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, Any]:
    # Names that share a tensor (tied weights) share its copy.
    copies = {
        id(value): copy(value) for value in values.values() if isinstance(value, torch.Tensor)
    }
    return {name: copies.get(id(value), value) for name, value in values.items()}
