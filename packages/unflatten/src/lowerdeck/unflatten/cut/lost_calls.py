"""Calls of which a program has what they compute alone, where it has no signatures of them.

Of a region that runs without gradients or under autocast ``run_decompositions`` leaves what it
computes, in the call that holds its operator, and of a branch or a loop export has a graph without
calls: which modules were called in there nobody can tell. Their hooks would not run, and those of
their other calls would run alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import islice

from torch.fx import GraphModule

from lowerdeck.torch_base import HigherOrderOperator, attribute_of
from lowerdeck.unflatten.calls.carrying import LOST_PART, MAY_BE_IN_BRANCHES
from lowerdeck.unflatten.cut.preserved import asked_signatures
from lowerdeck.unflatten.cut.preserved_frames import forbid_replacing, forbid_uncalled
from lowerdeck.unflatten.cut.working_graph import WorkingGraph
from lowerdeck.unflatten.trace.call_tree import Frame, frames_around
from lowerdeck.unflatten.trace.flat_items import Item, Role
from lowerdeck.unflatten.trace.trace import Trace


def forbid_lost_calls(trace: Trace, made: WorkingGraph) -> None:
    """Forbid changing modules of which a call may have been written out in the caller.

    Args:
        trace: The program.
        made: The working graph, whole but for its output; preserved calls are known.
    """
    branches = [item for item in trace.items if _holds_graphs(item)]
    if not (trace.written_out or branches):
        return
    asked = {name.partition("@")[0] for name in asked_signatures(trace.program)}
    frames: dict[str, list[Frame]] = {}
    for frame in made.tree.frames():
        frames.setdefault(trace.paths.canonical(frame.path), []).append(frame)
    # To forbid a part also names the block around it, which is not checked by that.
    told = {path for path in made.forbidden if made.is_uncalled(path)}
    why = dict.fromkeys(_paths(trace, branches, frames), MAY_BE_IN_BRANCHES)
    why.update(dict.fromkeys(_paths(trace, trace.written_out), LOST_PART))
    # What is forbidden last is checked first: who replaces a block is told so, not of its parts.
    for path in reversed(why):
        if not path or path in asked or path in told:
            continue
        calls = frames.get(trace.paths.canonical(path), ())
        for frame in calls:
            if frame.parent is not None:
                forbid_replacing(made, frame, frame.parent, why[path])
        if not calls:
            forbid_uncalled(trace, made, path, why[path])


def _holds_graphs(item: Item) -> bool:
    """Return whether a step is an operator that runs a graph."""
    node, held = item.node, item.scope.module
    is_operator = item.role is Role.COMPUTE and isinstance(node.target, HigherOrderOperator)
    return is_operator and any(
        isinstance(attribute_of(held, each), GraphModule)
        for each in node.all_input_nodes
        if each.op == "get_attr"
    )


def _paths(
    trace: Trace, lost: Sequence[Item], called: Container[str] | None = None
) -> Iterator[str]:
    """Yield the modules that may have been called where steps were computed.

    Args:
        trace: The program.
        lost: The steps.
        called: Those of which calls are known: without weights, they are not among these.
    """
    by_frame: dict[Frame, list[Item]] = {}
    for item in lost:
        by_frame.setdefault(trace.tree.frame_of[item], []).append(item)
    written = {str(mutation.spec.target) for mutation in trace.mutations.all}
    kept = [one for one in trace.state.targets if written.isdisjoint(trace.state.names_of(one))]
    paths, with_weights = sorted(trace.paths.order), set(_owners(trace, kept))
    is_strict = _is_strict(trace)
    for outer, items in by_frame.items():
        read = {node.name for item in items for node in item.node.all_input_nodes}
        owners = set(_owners(trace, read & trace.state.targets.keys()))
        prefix = f"{outer.path}." if outer.path else ""
        for path in islice(paths, bisect_left(paths, prefix), None):
            if not path.startswith(prefix):
                break
            # Whatever has weights of which none is read there was not called there; state that
            # is written on the way is read as the value that was written last.
            may_be = path not in with_weights and (
                called is None or trace.paths.canonical(path) not in called
            )
            if path in owners or may_be:
                yield path
        # There the outermost module has what any other computes: what reads it may have made it.
        for frame in (frame for item in items if is_strict for frame in _readers(trace, item)):
            yield from (one.path for one in frames_around(frame, outer))


def _owners(trace: Trace, placeholders: Iterable[str]) -> Iterator[str]:
    """Yield the modules that hold state, and those around them, by all of their names."""
    for placeholder in placeholders:
        for name in trace.state.names_of(placeholder):
            owner = name.rpartition(".")[0]
            while owner:
                yield owner
                owner = owner.rpartition(".")[0]


def _is_strict(trace: Trace) -> bool:
    """Return whether strict export made the program: it numbers modules, others are named."""
    stacks = (item.node.meta.get("nn_module_stack") or {} for item in trace.items)
    return any(str(key).isdecimal() for stack in stacks for key in stack)


def _readers(trace: Trace, item: Item) -> Iterator[Frame]:
    known = item.scope.items
    return (trace.tree.frame_of[known[user]] for user in item.node.users if user in known)
