"""What decomposing gave to another call than the one that computes it.

``run_decompositions`` writes out the regions that run in another mode, and gives all that they
compute to the module that holds their operator, which strict export always makes the outermost.
Left there, a value would be computed from what the caller has, whatever a wrapper or a hook gives
the module that computes it in eager.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

from torch.export import ExportedProgram
from torch.fx import Node

from lowerdeck.unflatten.trace.call_tree import CallTree, Frame, common_ancestor, frames_around
from lowerdeck.unflatten.trace.flat_items import MODE_REGIONS, Item, Role

_REGIONS = frozenset(map(str, MODE_REGIONS))


def origins(node: Node) -> list[Any]:
    """Return what ``node`` was made of, through all the passes since export."""
    found = list(node.meta.get("from_node") or ())
    for source in found:
        found.extend(source.from_node)
    return found


def lost_its_stack(node: Node) -> bool:
    """Return whether ``node`` was written out of a region, and has the stack of its operator."""
    return any(map(_is_of_region, node.meta.get("from_node") or ()))


def _is_of_region(source: Any) -> bool:
    return str(source.target) in _REGIONS or any(map(_is_of_region, source.from_node))


def find_lost(program: ExportedProgram, tree: CallTree, items: Sequence[Item]) -> list[Item]:
    """Give what was written out of a region to the call that computes it, where signatures tell.

    What a call returns, and what it alone reads, it computes, unless it is an argument of it.

    Args:
        program: The program.
        tree: The innermost call around each step; changed.
        items: The steps.

    Returns:
        All that was written out of a region, whether the call that computes it is known or not.
    """
    lost = [item for item in items if item.role is Role.COMPUTE and lost_its_stack(item.node)]
    signatures = {entry.fqn: entry.signature for entry in program.module_call_graph if entry.fqn}
    if not any(signatures.values()):
        return lost
    taken: dict[Frame, set[str]] = {}
    makers: dict[str, Frame] = {}
    for frame in tree.frames() if lost else ():
        signature = signatures.get(frame.call_name)
        if signature is not None:
            taken[frame] = _names(signature.inputs)
            # Parents come before their children: the innermost call that returns it stays.
            makers.update(dict.fromkeys(_names(signature.outputs) - taken[frame], frame))
    returned = set(program.graph_signature.user_outputs)
    for item in reversed(lost):
        name, outer = item.node.name, tree.frame_of[item]
        readers = _readers(tree, item)
        found = makers.get(name)
        if found is None and readers and name not in returned:
            found = reduce(common_ancestor, readers)
        for frame in _between(outer, found):
            if name in taken.get(frame, ()):
                break
            if frame in taken:
                tree.frame_of[item] = frame
        inner = tree.frame_of[item]
        for frame in (frame for reader in readers for frame in _between(inner, reader)):
            if frame in taken and name not in taken[frame]:
                tree.lost.add(frame)
    return lost


def _between(outer: Frame, inner: Frame | None) -> list[Frame]:
    """Return the calls from within ``outer`` to ``inner``, outer ones first."""
    if inner is None or common_ancestor(inner, outer) is not outer:
        return []
    return frames_around(inner, outer)[::-1]


def _names(specs: Sequence[Any]) -> set[str]:
    return {str(spec.name) for spec in specs}


def _readers(tree: CallTree, item: Item) -> list[Frame]:
    known = item.scope.items
    return [tree.frame_of[known[user]] for user in item.node.users if user in known]
