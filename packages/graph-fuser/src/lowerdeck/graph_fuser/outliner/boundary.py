"""Inputs, outputs and ordering constraints of each region."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from torch.fx import Node

from lowerdeck.graph_fuser.errors import RegionError
from lowerdeck.graph_fuser.regions import ROOT, RegionTree

InputOrder: TypeAlias = Literal["parent", "first_use"]
"""Order of a submodule's inputs: by position in the parent's graph, or by first use."""

Item: TypeAlias = Node | int
"""Item of a region body: a node, or the index of a called region."""


Edges: TypeAlias = dict[tuple[Item, Item], tuple[Node, Node]]
"""Ordering constraints between items of a body, each with the graph edge that causes it."""


@dataclass(slots=True)
class Boundary:
    """Inputs and outputs of every region.

    Attributes:
        inputs: Outer values read by each region.
        outputs: Inner values returned by each region.
    """

    inputs: Sequence[tuple[Node, ...]]
    outputs: Sequence[tuple[Node, ...]]


@dataclass(slots=True)
class _Crossings:
    """Boundary under construction; dicts serve as ordered sets."""

    inputs: list[dict[Node, None]]
    outputs: list[dict[Node, None]]
    edges: list[Edges]


def find_boundary(
    tree: RegionTree,
    *,
    order: Iterable[tuple[Node, Node]] = (),
    input_order: InputOrder = "parent",
) -> tuple[Boundary, Sequence[Edges]]:
    """Return all region boundaries, in O(region edges x depth).

    Args:
        order: Node pairs whose order must be preserved without a data dependency.
        input_order: How inputs are ordered.

    Returns:
        The boundary, and each body's ordering constraints that involve a region.

    Raises:
        RegionError: A region requests an invalid input or output.
    """
    size = len(tree.regions)
    crossings = _Crossings(
        inputs=[{} for _ in range(size)],
        outputs=[{} for _ in range(size)],
        edges=[{} for _ in range(size)],
    )
    _add_requested(tree, crossings)
    region_of = tree.region_of
    # Graph order defines first uses across the hierarchy.
    for node, index in region_of.items():
        for source in node.all_input_nodes:
            source_region = region_of.get(source, ROOT)
            # An edge inside one region crosses no border.
            if source_region == index:
                continue
            _cross(tree, crossings, source, source_region, node, index, carries=True)
        # Only nodes of regions are visited, so edges into the root are added at their source.
        for user in node.users:
            if user not in region_of:
                _cross(tree, crossings, node, index, user, ROOT, carries=True)
    for before, after in order:
        # A hazard orders two calls, but no value is passed between them.
        first, second = region_of.get(before, ROOT), region_of.get(after, ROOT)
        if first != second:
            _cross(tree, crossings, before, first, after, second, carries=False)
    return _sort(tree, crossings, input_order), crossings.edges


def _cross(
    tree: RegionTree,
    crossings: _Crossings,
    source: Node,
    left: int,
    target: Node,
    entered: int,
    *,
    carries: bool,
) -> None:
    """Record an edge from region ``left`` to ``entered``, up to their common ancestor."""
    parent, depth = tree.parent, tree.depth
    before: Item = source
    after: Item = target
    # Climb from the deeper end first, to meet at the lowest common ancestor.
    while left != entered:
        if depth[left] >= depth[entered]:
            if carries:
                crossings.outputs[left][source] = None
            before, left = left, parent[left]
        else:
            if carries:
                crossings.inputs[entered][source] = None
            after, entered = entered, parent[entered]
    # One graph edge per pair suffices to explain a cycle.
    crossings.edges[left].setdefault((before, after), (source, target))


def _add_requested(tree: RegionTree, crossings: _Crossings) -> None:
    for index in range(1, len(tree.regions)):
        region = tree.regions[index]
        if region is None:
            continue
        for node in region.inputs:
            if node not in tree.position or _within(tree, tree.region_of.get(node, ROOT), index):
                raise RegionError(
                    f"Region {region.name!r} requests input {node.name!r}, which is not an outer "
                    "node; expected a node of the graph that is outside of the region."
                )
            crossings.inputs[index][node] = None
            # The parent must receive the value too.
            _carry_in(tree, crossings, node, index)
        for node in region.outputs:
            if node not in tree.position or not _within(
                tree, tree.region_of.get(node, ROOT), index
            ):
                raise RegionError(
                    f"Region {region.name!r} requests output {node.name!r}, which is not an "
                    "inner node; expected a node of the region or of its children."
                )
            _carry_out(tree, crossings, node, index)


def _within(tree: RegionTree, index: int, ancestor: int) -> bool:
    while tree.depth[index] > tree.depth[ancestor]:
        index = tree.parent[index]
    return index == ancestor


def _carry_in(tree: RegionTree, crossings: _Crossings, node: Node, index: int) -> None:
    parent = tree.parent[index]
    source_region = tree.region_of.get(node, ROOT)
    before: Item = node
    while not _within(tree, source_region, parent):
        crossings.inputs[parent][node] = None
        index, parent = parent, tree.parent[parent]
    while source_region != parent:
        crossings.outputs[source_region][node] = None
        before, source_region = source_region, tree.parent[source_region]
    crossings.edges[parent].setdefault((before, index), (node, node))


def _carry_out(tree: RegionTree, crossings: _Crossings, node: Node, index: int) -> None:
    current = tree.region_of[node]
    while True:
        crossings.outputs[current][node] = None
        if current == index:
            return
        current = tree.parent[current]


def _sort(tree: RegionTree, crossings: _Crossings, input_order: InputOrder) -> Boundary:
    if input_order not in get_args(InputOrder):
        orders = ", ".join(map(repr, get_args(InputOrder)))
        raise RegionError(f"found input_order={input_order!r}; expected one of {orders}.")
    inputs: list[tuple[Node, ...]] = []
    outputs: list[tuple[Node, ...]] = []
    for index, region in enumerate(tree.regions):
        fixed = (region.inputs, region.outputs) if region is not None else ((), ())
        # Edges were visited in order of first use.
        is_sorted = input_order == "first_use"
        inputs.append(_in_order(tree, crossings.inputs[index], fixed[0], is_sorted=is_sorted))
        outputs.append(_in_order(tree, crossings.outputs[index], fixed[1]))
    return Boundary(inputs, outputs)


def _in_order(
    tree: RegionTree, nodes: dict[Node, None], first: Sequence[Node], *, is_sorted: bool = False
) -> tuple[Node, ...]:
    """Return ``first`` followed by the other nodes in graph order."""
    others = list(nodes)
    if len(others) > 1 and not is_sorted:
        others.sort(key=tree.position.__getitem__)
    return tuple(dict.fromkeys((*first, *others)) if first else others)
