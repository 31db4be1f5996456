"""Calls that decomposing wrote out in the caller, in programs that have no signatures of them.

Of a region that runs without gradients or under autocast ``run_decompositions`` leaves what it
computes, in the call that holds its operator: which modules were called in there nobody can tell.
Their hooks would not run, and those of their other calls would run alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import islice

from lowerdeck.unflatten.calls.carrying import LOST_PART
from lowerdeck.unflatten.cut.preserved import asked_signatures
from lowerdeck.unflatten.cut.preserved_frames import forbid_replacing, forbid_uncalled
from lowerdeck.unflatten.cut.working_graph import WorkingGraph
from lowerdeck.unflatten.trace.call_tree import Frame, frames_around
from lowerdeck.unflatten.trace.flat_items import Item
from lowerdeck.unflatten.trace.trace import Trace


def forbid_lost_calls(trace: Trace, made: WorkingGraph) -> None:
    """Forbid changing modules of which a call may have been written out in the caller.

    Args:
        trace: The program.
        made: The working graph, whole but for its output; preserved calls are known.
    """
    if not trace.written_out:
        return
    asked = {name.partition("@")[0] for name in asked_signatures(trace.program)}
    frames: dict[str, list[Frame]] = {}
    for frame in made.tree.frames():
        frames.setdefault(trace.paths.canonical(frame.path), []).append(frame)
    # To forbid a part also names the block around it, which is not checked by that.
    told = set(made.forbidden)
    # What is forbidden last is checked first: who replaces a block is told so, not of its parts.
    for path in reversed(dict.fromkeys(_paths(trace))):
        if not path or path in asked or path in told:
            continue
        calls = frames.get(trace.paths.canonical(path), ())
        for frame in calls:
            if frame.parent is not None:
                forbid_replacing(made, frame, frame.parent, LOST_PART)
        if not calls:
            forbid_uncalled(trace, made, path, LOST_PART)


def _paths(trace: Trace) -> Iterator[str]:
    """Yield the modules that may have been called where lost steps were computed."""
    by_frame: dict[Frame, list[Item]] = {}
    for item in trace.written_out:
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
            if path in owners or path not in with_weights:
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
