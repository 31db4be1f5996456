"""Cut the working graph into calls; inline calls that other calls interrupt.

State writes and mode switches have no data dependencies; explicit edges keep them in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise

from torch.fx import Node

from lowerdeck.graph_fuser import CycleError, OutlinePlan, Region, plan_outline
from lowerdeck.torch_base import arguments_of, written_arguments
from lowerdeck.unflatten._torch_private import ENTER_AUTOCAST, EXIT_AUTOCAST, SET_GRAD_MODE
from lowerdeck.unflatten.cut.signatures import flat_call
from lowerdeck.unflatten.cut.working_graph import WorkingGraph
from lowerdeck.unflatten.errors import UnsupportedProgramError
from lowerdeck.unflatten.trace.calls import Frame

SWITCHES = frozenset({ENTER_AUTOCAST, EXIT_AUTOCAST, SET_GRAD_MODE})
"""Functions that enter or exit a mode."""

INTERRUPTED = "is interrupted by other modules whose results it reads, so the call is inlined"


def cut(working: WorkingGraph) -> tuple[OutlinePlan, dict[Frame, Region]]:
    """Return the outlining plan of the graph and the region of each call.

    Nodes of a call may be interleaved with others. They are moved together if dependencies allow;
    otherwise the call is inlined in its caller.

    Args:
        working: The working graph; its tree is changed where calls are inlined.

    Raises:
        UnsupportedProgramError: The nodes are not in topological order.
    """
    position: dict[Node, int] | None = None
    order = list(write_order(working))
    while True:
        regions = _regions(working)
        outermost = [regions[child] for child in working.tree.root.children]
        try:
            plan = plan_outline(working.graph, outermost, input_order="first_use", order=order)
        except CycleError as error:
            if position is None:
                position = {node: number for number, node in enumerate(working.graph.nodes)}
            frame_of = working.tree.node_frames()
            # The path names innermost calls; the conflict may be between enclosing calls.
            inner = {frame_of[node] for node in error.path if node in frame_of}
            stuck = {outer for frame in inner for outer in frame.around()}
            edges = [*order, *pairwise(error.path)]
            if not _absorb(working, stuck, position, edges) and not _inline_interrupted(
                working, stuck, position
            ):
                raise UnsupportedProgramError(
                    f"The program's nodes are not in topological order: {error}"
                ) from error
        else:
            return plan, regions


def _regions(working: WorkingGraph) -> dict[Frame, Region]:
    regions: dict[Frame, Region] = {}
    frames = working.tree.frames()
    names = dict(_call_names(frames))
    for frame in reversed(frames):
        region = regions[frame] = Region(names.get(frame, ""), frame.nodes)
        if frame.children:
            region.children = [regions[child] for child in frame.children]
        if (call := working.preserved.get(frame)) is not None:
            inputs = region.inputs = call.nodes(call.inputs)
            region.outputs = [node for node in call.nodes(call.outputs) if node not in inputs]
            region.always_return_tuple = True
    return regions


def _call_names(frames: Iterable[Frame]) -> Iterator[tuple[Frame, str]]:
    """Yield all calls, each with a name unique in its caller."""
    for frame in frames:
        used: dict[str, int] = {}
        for child in frame.children:
            name = accessor = child.accessor
            while name in used:
                used[accessor] += 1
                name = f"{accessor}@{used[accessor]}"
            used[name] = 0
            yield child, name


def _absorb(
    working: WorkingGraph,
    frames: Iterable[Frame],
    position: Mapping[Node, int],
    edges: Iterable[tuple[Node, Node]],
) -> bool:
    """Move caller nodes between two nodes of a call into the call; return whether any moved.

    Nodes whose module stack a pass dropped belong to the caller, which cannot run them inside the
    call.
    """
    has_moved = False
    later: dict[Node, list[Node]] = {}
    earlier: dict[Node, list[Node]] = {}
    for before, after in edges:
        later.setdefault(before, []).append(after)
        earlier.setdefault(after, []).append(before)
    for frame in sorted(frames, key=lambda frame: -frame.depth):
        if frame.parent is None or frame not in frame.parent.children:
            continue
        inside = set(frame.all_nodes())
        readers = _reachable(inside, lambda node: (*node.users, *later.get(node, ())))
        between = readers & _reachable(
            inside, lambda node: (*node.all_input_nodes, *earlier.get(node, ()))
        )
        if not between or not between.issubset(frame.parent.nodes):
            continue
        if any(node.target in SWITCHES or node in working.reads for node in between):
            # Mode switches must stay paired, and state reads belong to their owner.
            continue
        has_moved = True
        frame.parent.nodes = [node for node in frame.parent.nodes if node not in between]
        frame.nodes = sorted((*frame.nodes, *between), key=position.__getitem__)
        call = working.preserved.get(frame)
        if call is not None and call.signature.is_flat:
            working.preserved[frame] = flat_call(frame)
    return has_moved


def _reachable(start: Iterable[Node], following: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """Return the nodes outside ``start`` that are reachable through ``following``."""
    seen = set(start)
    reached: set[Node] = set()
    queue = list(seen)
    while queue:
        for node in following(queue.pop()):
            if node not in seen:
                seen.add(node)
                reached.add(node)
                queue.append(node)
    return reached


def _inline_interrupted(
    working: WorkingGraph, frames: Iterable[Frame], position: Mapping[Node, int]
) -> bool:
    """Inline the calls of ``frames`` that other calls interrupt; return whether there were any."""
    has_inlined = False
    # Outer calls first: the calls in an inlined one may not be interrupted in its caller.
    for frame in sorted(frames, key=lambda frame: frame.depth):
        if frame.parent is None or frame not in frame.parent.children:
            continue
        inside = set(frame.all_nodes())
        places = [position[node] for node in inside]
        others = (position[node] for node in frame.parent.all_nodes() if node not in inside)
        if any(min(places) < place < max(places) for place in others):
            _inline(working, frame, frame.parent, position)
            has_inlined = True
    return has_inlined


def _inline(
    working: WorkingGraph, frame: Frame, parent: Frame, position: Mapping[Node, int]
) -> None:
    """Move the nodes and calls of ``frame`` to its caller."""
    for node in frame.nodes:
        if node in working.reads:
            node.target = f"{frame.accessor}.{node.target}"
    parent.nodes = sorted((*parent.nodes, *frame.nodes), key=position.__getitem__)
    for child in frame.children:
        child.parent = parent
    siblings = [child for child in parent.children if child is not frame]
    siblings += frame.children
    parent.children = sorted(
        siblings, key=lambda child: min(map(position.__getitem__, child.all_nodes()))
    )
    for inner in parent.below():
        inner.depth = inner.parent.depth + 1 if inner.parent is not None else 0
    working.preserved.pop(frame, None)
    working.refusals[frame.path] = INTERRUPTED


# Ordering without data dependencies.


def write_order(working: WorkingGraph) -> Iterator[tuple[Node, Node]]:
    """Yield ordering edges (before, after) to keep when a call's nodes move together.

    Each call reads state through its own node, so the graph does not show these aliases. No step
    may move into or out of a mode region.
    """
    yield from _state_order(working)
    if _has_switches(working):
        yield from _mode_order(working)


def _state_order(working: WorkingGraph) -> Iterator[tuple[Node, Node]]:
    if not working.reads:
        return
    targets = {node.target for node in working.graph.nodes if node.op == "call_function"}
    if not any(map(written_arguments, targets)):
        return
    written = {name for node in working.graph.nodes for name in _written(node, working)}
    last_write: dict[str, Node] = {}
    reads: dict[str, list[Node]] = {}
    for node in working.graph.nodes if written else ():
        for source in node.all_input_nodes:
            name = working.reads.get(source)
            if name not in written:
                continue
            if name in last_write:
                yield last_write[name], node
            reads.setdefault(name, []).append(node)
        for name in dict.fromkeys(_written(node, working)):
            for reader in reads.pop(name, ()):
                if reader is not node:
                    yield reader, node
            last_write[name] = node


def _written(node: Node, working: WorkingGraph) -> Iterator[str]:
    written = written_arguments(node.target)
    for name, value in arguments_of(node).items() if written else ():
        if name in written and isinstance(value, Node) and value in working.reads:
            yield working.reads[value]


def _has_switches(working: WorkingGraph) -> bool:
    find = working.graph.find_nodes
    return any(find(op="call_function", target=target, sort=False) for target in SWITCHES)


def _mode_order(working: WorkingGraph) -> Iterator[tuple[Node, Node]]:
    switch: Node | None = None
    since: list[Node] = []
    for node in working.graph.nodes:
        if node.op in {"placeholder", "output", "get_attr"}:
            continue
        if switch is not None:
            yield switch, node
        if node.target in SWITCHES:
            yield from ((earlier, node) for earlier in since)
            switch, since = node, []
        else:
            since.append(node)
