"""All that an exported program tells of the modules that it came from, read once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.export import ExportedProgram

from lowerdeck.unflatten.trace.call_frames import build_call_tree
from lowerdeck.unflatten.trace.call_tree import CallTree
from lowerdeck.unflatten.trace.flat_items import Item, flat_items
from lowerdeck.unflatten.trace.lifted_constants import share_lifted_constants
from lowerdeck.unflatten.trace.lost_stacks import find_lost
from lowerdeck.unflatten.trace.module_paths import ModulePaths, module_names
from lowerdeck.unflatten.trace.mutations import Mutations
from lowerdeck.unflatten.trace.shared_modules import note_shared_modules
from lowerdeck.unflatten.trace.state import ProgramState
from lowerdeck.unflatten.trace.write_back import plan_mutations


@dataclass(frozen=True, slots=True)
class Trace:
    """What a program tells.

    Attributes:
        program: The program, without effect tokens; it stays as it is.
        items: Its steps, those of graphs that only switch a mode among them.
        state: Its parameters, buffers and constants.
        paths: Its modules.
        tree: The calls of modules around its steps.
        mutations: Where new values are written back.
        written_out: Those steps that decomposing wrote out of a region of another mode.
    """

    program: ExportedProgram
    items: Sequence[Item]
    state: ProgramState
    paths: ModulePaths
    tree: CallTree
    mutations: Mutations
    written_out: Sequence[Item]

    @classmethod
    def of(cls, program: ExportedProgram, *, inplace: bool) -> Trace:
        """Read ``program``.

        Args:
            program: The program.
            inplace: Whether a functional program's state is written where eager writes it.
        """
        state = ProgramState(program)
        share_lifted_constants(program, state)
        paths = ModulePaths(module_names(program))
        for name in state.entries:
            paths.add(name.rpartition(".")[0])
        items = list(flat_items(program.graph_module))
        note_shared_modules(paths, items, state, program)
        tree = build_call_tree(items, paths)
        written_out = find_lost(program, tree, items)
        mutations = plan_mutations(program, items, tree, state, paths)
        if not inplace:
            mutations.keep_functional()
        return cls(program, items, state, paths, tree, mutations, written_out)
