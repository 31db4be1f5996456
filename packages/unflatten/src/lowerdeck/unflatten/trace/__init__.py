"""Recover the eager module hierarchy of an exported program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.export import ExportedProgram

from lowerdeck.unflatten.metadata import MODULE_NUMBERS, read_notes
from lowerdeck.unflatten.trace.calls import CallTree, build_call_tree
from lowerdeck.unflatten.trace.modes import place_mode_switches
from lowerdeck.unflatten.trace.mutations import Mutations, plan_mutations
from lowerdeck.unflatten.trace.names import ModulePaths, find_shared_modules, module_names
from lowerdeck.unflatten.trace.program import Item, ProgramState, flatten_regions


@dataclass(frozen=True, slots=True)
class Trace:
    """The modules, state and calls of a program.

    Attributes:
        program: The program, without effect tokens; not changed.
        items: Steps, with mode regions flattened to enter and exit steps.
        state: Its parameters, buffers and constants.
        paths: The names of its modules.
        tree: The module calls that contain its steps.
        mutations: The write-backs of new values of state and inputs.
        notes: What ``export_preserving`` recorded, by kind and module name.
    """

    program: ExportedProgram
    items: Sequence[Item]
    state: ProgramState
    paths: ModulePaths
    tree: CallTree
    mutations: Mutations
    notes: Mapping[str, Mapping[str, Any]]


def trace_program(program: ExportedProgram, *, inplace: bool) -> Trace:
    """Return the modules, state and calls of ``program``.

    Args:
        inplace: Write state where eager does, also in a functional program.
    """
    state = ProgramState(program)
    paths = ModulePaths(module_names(program))
    for name in state.entries:
        paths.add(name.rpartition(".")[0])
    items, notes = list(flatten_regions(program.graph_module)), read_notes(program)
    find_shared_modules(paths, items, state, notes[MODULE_NUMBERS])
    tree = build_call_tree(items, paths)
    place_mode_switches(tree, items)
    mutations = plan_mutations(program, items, tree, state, paths)
    if not inplace:
        mutations.keep_functional()
    return Trace(program, items, state, paths, tree, mutations, notes)
