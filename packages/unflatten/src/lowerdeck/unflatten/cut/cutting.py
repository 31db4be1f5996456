"""Cut the working graph into its calls; split a call that cannot be made in one piece."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise

from torch.fx import Node

from lowerdeck.graph_fuser import CycleError, OutlinePlan, Region, plan_outline
from lowerdeck.unflatten.cut.flat_calls import with_other_values
from lowerdeck.unflatten.cut.working_graph import WorkingGraph
from lowerdeck.unflatten.cut.write_order import SWITCHES, write_order
from lowerdeck.unflatten.errors import UnsupportedProgramError
from lowerdeck.unflatten.trace.call_tree import Frame, frames_around


def cut(working: WorkingGraph) -> tuple[OutlinePlan, dict[Frame, Region]]:
    """Return how the graph falls into calls, and the region of each call.

    The nodes of a call need not be together in the program. They are brought together where
    dependencies allow; a call that another one interrupts for good becomes several.

    Args:
        working: The working graph; its tree is changed where calls are split.

    Raises:
        UnsupportedProgramError: The program is no program: a node depends on itself.
    """
    position: dict[Node, int] | None = None
    order = list(write_order(working))
    while True:
        regions = _regions(working)
        outermost = [regions[child] for child in working.tree.root.children]
        try:
            plan = plan_outline(
                working.graph,
                outermost,
                input_order="first_use",
                order=order,
                attribute_name=_local_reads(working, regions) if working.local else None,
            )
        except CycleError as error:
            if position is None:
                position = {node: number for number, node in enumerate(working.graph.nodes)}
            frame_of = {node: frame for frame in working.tree.frames() for node in frame.nodes}
            # The path shows the innermost calls; what gets in each other's way may be around them.
            inner = {frame_of[node] for node in error.path if node in frame_of}
            stuck = {outer for frame in inner for outer in frames_around(frame)}
            edges = [*order, *pairwise(error.path)]
            if not _absorb(working, stuck, position, edges) and not _split_all(
                working, stuck, position
            ):
                raise UnsupportedProgramError(
                    f"The program's nodes are not in an order in which they can run: {error}"
                ) from error
        else:
            return plan, regions


def _local_reads(
    working: WorkingGraph, regions: Mapping[Frame, Region]
) -> Callable[[Region | None, Node], str | None]:
    """Return what tells the attribute by which a region reads a placeholder of state."""
    paths: dict[Region | None, str] = {region: frame.path for frame, region in regions.items()}
    paths[None] = ""
    local = working.local
    return lambda region, node: local.get((paths[region], node))


def _regions(working: WorkingGraph) -> dict[Frame, Region]:
    regions: dict[Frame, Region] = {}
    frames = working.tree.frames()
    names = {child: name for frame in frames for child, name in _call_names(frame)}
    for frame in reversed(frames):
        children = [regions[child] for child in frame.children]
        name = names.get(frame, "")
        call = working.preserved.get(frame)
        if call is None:
            regions[frame] = Region(name, frame.nodes, children)
            continue
        taken = set(call.nodes(call.inputs))
        regions[frame] = Region(
            name,
            frame.nodes,
            children,
            always_return_tuple=True,
            inputs=call.nodes(call.inputs),
            outputs=[node for node in call.nodes(call.outputs) if node not in taken],
        )
    return regions


def _call_names(frame: Frame) -> Iterator[tuple[Frame, str]]:
    """Yield the calls that ``frame`` makes with names of their own, the callee's where it is free.

    Calls of one module get its name as their target later.
    """
    used: dict[str, int] = {}
    for child in frame.children:
        wanted = name = child.accessor
        while name in used:
            used[wanted] += 1
            name = f"{wanted}@{used[wanted]}"
        used[name] = 0
        yield child, name


def _absorb(
    working: WorkingGraph,
    frames: Iterable[Frame],
    position: Mapping[Node, int],
    edges: Iterable[tuple[Node, Node]],
) -> bool:
    """Take into each call what its caller computes between two of its nodes; return if anything.

    A caller cannot do that: it sees what a call computes when the call has ended. Passes that
    lose the module stack of a node leave it to the caller.
    """
    found = False
    later: dict[Node, list[Node]] = {}
    earlier: dict[Node, list[Node]] = {}
    for one, two in edges:
        later.setdefault(one, []).append(two)
        earlier.setdefault(two, []).append(one)
    for frame in sorted(frames, key=lambda frame: -frame.depth):
        if frame.parent is None or frame not in frame.parent.children:
            continue
        inside = set(_nodes(frame))
        after = _reached(inside, lambda node: (*node.users, *later.get(node, ())))
        between = after & _reached(
            inside, lambda node: (*node.all_input_nodes, *earlier.get(node, ()))
        )
        if not between or not between.issubset(frame.parent.nodes):
            continue
        if any(node.target in SWITCHES for node in between):
            # Where a mode begins and ends must stay together.
            continue
        if not _reads_own_state(working, frame, between):
            continue
        found = True
        frame.parent.nodes = [node for node in frame.parent.nodes if node not in between]
        frame.nodes = sorted((*frame.nodes, *between), key=position.__getitem__)
        call = working.preserved.get(frame)
        if call is not None and call.signature.flat:
            working.preserved[frame] = with_other_values(frame)
    return found


def _reads_own_state(working: WorkingGraph, frame: Frame, nodes: Iterable[Node]) -> bool:
    """Note how ``frame`` names the state that ``nodes`` read; return whether it has names."""
    names: dict[tuple[str, Node], str] = {}
    for node in nodes:
        for source in node.all_input_nodes:
            name = working.local.get(("", source))
            if name is None:
                continue
            if not name.startswith(frame.path + "."):
                return False
            names[frame.path, source] = name[len(frame.path) + 1 :]
    if names:
        working.local = {**working.local, **names}
    return True


def _reached(start: Iterable[Node], following: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """Return the nodes beside ``start`` to which ``following`` leads from there."""
    seen = set(start)
    found: set[Node] = set()
    queue = list(seen)
    while queue:
        for node in following(queue.pop()):
            if node not in seen:
                seen.add(node)
                found.add(node)
                queue.append(node)
    return found


def _split_all(
    working: WorkingGraph, frames: Iterable[Frame], position: Mapping[Node, int]
) -> bool:
    """Split those of ``frames`` that are not in one piece; return whether there were any."""
    found = False
    # Outer ones first: splitting one replaces those in it.
    for frame in sorted(frames, key=lambda frame: frame.depth):
        if frame.parent is None or frame not in frame.parent.children:
            continue
        pieces = _pieces(frame, position)
        if len(pieces) < 2:
            continue
        found = True
        siblings = frame.parent.children
        index = siblings.index(frame)
        siblings[index : index + 1] = [
            _part(working, frame, frame.parent, number, piece)
            for number, piece in enumerate(pieces, start=1)
        ]
        siblings.sort(key=lambda child: position[_first(child, position)])
    return found


def _pieces(frame: Frame, position: Mapping[Node, int]) -> list[set[Node]]:
    """Return the runs of ``frame`` that nothing else of its parent interrupts."""
    inside = set(_nodes(frame))
    around = _nodes(frame.parent) if frame.parent is not None else inside
    pieces: list[set[Node]] = []
    running = False
    for node in sorted(around, key=position.__getitem__):
        if node not in inside:
            running = False
        elif running:
            pieces[-1].add(node)
        else:
            pieces.append({node})
            running = True
    return pieces


def _part(
    working: WorkingGraph, frame: Frame, parent: Frame, number: int, nodes: set[Node]
) -> Frame:
    """Return the part of ``frame`` that holds ``nodes``; a part keeps no signature."""
    part = replace(frame, parent=parent, depth=parent.depth + 1, part=number)
    part.children = []
    part.nodes = [node for node in frame.nodes if node in nodes]
    for child in frame.children:
        held = nodes.intersection(_nodes(child))
        if held:
            part.children.append(_part(working, child, part, number, held))
    whole = len(nodes) == sum(1 for _ in _nodes(frame))
    if whole:
        part.part = 0
        call = working.preserved.pop(frame, None)
        if call is not None:
            working.preserved[part] = call
    return part


def _nodes(frame: Frame | None) -> list[Node]:
    found: list[Node] = []
    queue = [frame] if frame is not None else []
    for current in queue:
        found.extend(current.nodes)
        queue.extend(current.children)
    return found


def _first(frame: Frame, position: Mapping[Node, int]) -> Node:
    return min(_nodes(frame), key=position.__getitem__)
