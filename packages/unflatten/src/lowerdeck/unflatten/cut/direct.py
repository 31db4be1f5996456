"""Programs whose own graph can be cut into modules as it is, without a working copy of it.

Most can: functional ones that overwrite nothing, run nothing in another mode, preserve no
signature and have lost none of their calls. Their state is read where it is used, by the
attribute that the module there owns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from lowerdeck.torch_base import OpOverload, schema_of
from lowerdeck.unflatten._torch_private import ENTER_AUTOCAST, EXIT_AUTOCAST, SET_GRAD_MODE
from lowerdeck.unflatten.cut.preserved import asked_signatures, not_recorded
from lowerdeck.unflatten.cut.state_reads import names_known
from lowerdeck.unflatten.cut.working_graph import WorkingGraph
from lowerdeck.unflatten.trace.flat_items import Item, Role
from lowerdeck.unflatten.trace.trace import Trace

_SWITCHES = (SET_GRAD_MODE, ENTER_AUTOCAST, EXIT_AUTOCAST)


def direct_graph(trace: Trace) -> WorkingGraph | None:
    """Return the program's own graph, to be read and not changed, or None if that will not do.

    Args:
        trace: The program; nodes are entered in the calls of its tree where the graph will do.
    """
    program, items, state, tree = trace.program, trace.items, trace.state, trace.tree
    if trace.mutations.count or not _is_plain(program, items) or asked_signatures(program):
        return None
    if trace.written_out or tree.called_elsewhere or not_recorded(program):
        return None
    placeholders = program.graph.find_nodes(op="placeholder")
    held = [node for node in placeholders if node.name in state.targets]
    path_of = {item.node: tree.frame_of[item].path for item in items}
    local: dict[tuple[str, Node], str] = {}
    for node in held:
        names = state.names_of(node.name)
        # The outermost module reads whatever it wants by its name.
        local["", node] = names[0]
        for user in node.users:
            owner = path_of.get(user, "")
            found = (trace.paths.attribute(owner, name) for name in names)
            path = next((text for text in found if text is not None), None)
            if path is None or names_known(trace.paths, owner, path, names):
                return None
            local.setdefault((owner, node), path)
    for item in items:
        tree.frame_of[item].nodes.append(item.node)
    inputs = [node for node in placeholders if node.name not in state.targets]
    return WorkingGraph(program.graph, tree, inputs, local=local)


def _is_plain(program: ExportedProgram, items: Sequence[Item]) -> bool:
    """Return whether every step is in the outermost graph and only computes a value."""
    others = sum(1 for node in program.graph.nodes if node.op in {"placeholder", "output"})
    if len(items) + others != len(program.graph.nodes):
        return False
    if any(item.role is not Role.COMPUTE for item in items):
        return False
    # By identity: hashing an operator is a call into Python.
    targets = {id(item.node.target): item.node for item in items}
    return all(_computes(node) for node in targets.values())


def _computes(node: Node) -> bool:
    if node.op != "call_function" or node.target in _SWITCHES:
        return False
    if node.target is torch.ops.aten.alias.default:
        # It may stand for a detach, which must be written again.
        return False
    return not (isinstance(node.target, OpOverload) and schema_of(node.target).is_mutable)
