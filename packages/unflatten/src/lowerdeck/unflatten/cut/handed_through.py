"""Values that a call computed nothing for: it was given them, and export named them anew.

``x.to(x.dtype)`` and ``x.add_(1)`` return ``x`` itself. Export gives the tensor the name of the
operator from then on, so that whoever reads ``x`` later seems to read what is computed inside the
module: the residual around a norm, say. In eager it reads what it had all along, whatever module
is called in between.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from torch.fx import Node

from lowerdeck.torch_base import returns_written
from lowerdeck.unflatten.calls.carrying import (
    is_read_as_argument,
    is_told_from_argument,
    is_unread_result,
    must_hand_through,
)
from lowerdeck.unflatten.cut.preserved import Leaf, PreservedCall
from lowerdeck.unflatten.cut.working_graph import WorkingGraph, nodes_in
from lowerdeck.unflatten.results import argument_of
from lowerdeck.unflatten.trace.call_tree import Frame, common_ancestor, frames_around


def read_arguments_themselves(made: WorkingGraph) -> None:
    """Let what is outside of a preserved call read the call's argument, not the call's name of it.

    Results of the call stay what they are: a module in its place may return another value.

    Args:
        made: The whole working graph; changed.
    """
    frame_of = {node: frame for frame in made.tree.frames() for node in frame.nodes}
    named_by: dict[Node, list[Frame]] = {}
    for frame, call in made.preserved.items():
        for leaf in call.nodes((*call.inputs, *call.outputs)):
            named_by.setdefault(leaf, []).append(frame)
    for node, inner in frame_of.items():
        given = _given(node, inner, frame_of)
        if given is None:
            continue
        # First: what a call around it returns as its own, that call's readers read from it.
        _rename_leaves(made, node, inner, given, named_by)
        for user in list(node.users):
            if user.target is must_hand_through:
                continue  # it compares the two
            if _only_hands_through(made, node, inner, frame_of.get(user, made.tree.root)):
                user.replace_input_with(node, given)
    for frame, call in made.preserved.items():
        found = {leaf: _written(leaf, call) for leaf in call.nodes(call.outputs)}
        written = {leaf: given for leaf, given in found.items() if given is not None}
        held = dict(_held(made, frame, call, frame_of))
        made.preserved[frame] = replace(call, written=written, held=held)


def guard_written_arguments(made: WorkingGraph) -> None:
    """Let callers check that a call returns the argument that it writes, if others read it.

    Export has one name for both from then on. Calls of known signature check that themselves.

    Args:
        made: The whole working graph; changed.
    """
    frame_of = {node: frame for frame in made.tree.frames() for node in frame.nodes}
    added: set[Node] = set()
    for node, inner in frame_of.items():
        if argument_of(node) is None or is_told_from_argument(node):
            continue
        given: Node = node
        is_written = False
        readers = [frame_of.get(user, made.tree.root) for user in node.users.keys() - added]
        for frame in frames_around(inner):
            # First what most nodes answer with no: who walks back from each of a chain of writes
            # walks as far as its square.
            if all(frame in frames_around(reader) for reader in readers):
                break
            while given in frame_of and frame in frames_around(frame_of[given]):
                source = argument_of(given)
                is_written |= source is not None and returns_written(given.target)
                if source is None or source.op == "get_attr":
                    break
                given = source
            owner = frame_of.get(given, made.tree.root)
            if frame.parent is None or frame in frames_around(owner):
                break
            if frame not in made.preserved and is_written:
                added.add(_check_handed_through(made, frame, frame.parent, node, given))


def _check_handed_through(
    made: WorkingGraph, frame: Frame, caller: Frame, node: Node, given: Node
) -> Node:
    last = max(nodes_in(frame))
    with made.graph.inserting_after(last):
        check = (node, given, frame.accessor, "its result")
        checked = made.graph.call_function(must_hand_through, check)
    insort(caller.nodes, checked)
    return checked


def _held(
    made: WorkingGraph, frame: Frame, call: PreservedCall, frame_of: Mapping[Node, Frame]
) -> Iterator[tuple[Node, str]]:
    """Yield the results of ``call`` that are state which its caller reads too, and as what.

    The program has one value for both, and does not tell which of them the caller means.
    """
    for leaf in call.nodes(call.outputs):
        state = made.reads.get(leaf)
        for read, placeholder in made.reads.items() if state is not None else ():
            if placeholder == state and frame_of.get(read) is frame.parent:
                yield leaf, str(read.target)


def _written(node: Node, call: PreservedCall) -> Node | None:
    """Return the argument of ``call`` that it writes and returns as ``node``, if others read it.

    Export has one name for both from then on.
    """
    is_told = is_told_from_argument(node)
    if is_told and not is_read_as_argument(node):
        return None
    found, is_written = node, is_told
    while found not in call.inputs:
        source = argument_of(found)
        if source is None:
            return None
        is_written |= returns_written(found.target)
        found = source
    return found if found is not node and is_written else None


def note_given_back(made: WorkingGraph) -> None:
    """Note of preserved calls which results are arguments, where nothing tells the two apart.

    Args:
        made: The whole working graph; changed.
    """
    for frame, call in made.preserved.items():
        found = {leaf: _given_back(leaf, call) for leaf in call.nodes(call.outputs)}
        given = {leaf: source for leaf, source in found.items() if source is not None}
        if given:
            made.preserved[frame] = replace(call, given=given)


def _given_back(node: Node, call: PreservedCall) -> Node | None:
    """Return the argument of ``call`` that it returns as ``node`` if that is not told."""
    found: Node | None = node
    while found is not None and found not in call.inputs:
        found = argument_of(found)
    return found if found is not node and not is_told_from_argument(node) else None


def _given(node: Node, inner: Frame, frame_of: dict[Node, Frame]) -> Node | None:
    """Return the tensor from outside of ``inner`` that ``node`` returns, None if there is none."""
    found = node
    while (source := argument_of(found)) is not None:
        found = source
        if found.op == "get_attr":
            # State, which each module reads by a name of its own.
            return None
        if frame_of.get(found) is not inner:
            return found
    return None


def _only_hands_through(made: WorkingGraph, node: Node, inner: Frame, reader: Frame) -> bool:
    """Return whether ``reader`` is outside of a preserved call of which ``node`` is no result.

    A result that nobody reads is none: who reads its name means the argument.
    """
    calls = [
        made.preserved[frame]
        for frame in frames_around(inner, common_ancestor(inner, reader))
        if frame in made.preserved
    ]
    return bool(calls) and not any(
        node in call.outputs and not is_unread_result(node, call.path) for call in calls
    )


def _rename_leaves(
    made: WorkingGraph, node: Node, inner: Frame, given: Node, named_by: dict[Node, list[Frame]]
) -> None:
    """Let the arguments and results of other preserved calls be the argument itself too."""
    for frame in sorted(named_by.get(node, ()), key=lambda frame: -frame.depth):
        call = made.preserved[frame]
        inputs, outputs = call.inputs, call.outputs
        caller = frame.parent if frame.parent is not None else frame
        if _only_hands_through(made, node, inner, caller):
            inputs = _renamed(inputs, node, given)
        if _only_hands_through(made, node, inner, frame):
            outputs = _renamed(outputs, node, given)
        made.preserved[frame] = replace(call, inputs=inputs, outputs=outputs)
        named_by.setdefault(given, []).append(frame)


def _renamed(leaves: Iterable[Leaf], node: Node, given: Node) -> tuple[Leaf, ...]:
    return tuple(given if leaf is node else leaf for leaf in leaves)
