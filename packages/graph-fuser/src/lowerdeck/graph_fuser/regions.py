"""Trees of regions: nodes to be outlined into submodules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch.fx import Graph, Node

from lowerdeck.graph_fuser.errors import RegionError

ROOT = 0
"""Index of the implicit root region, which has all remaining nodes."""

_NO_CHILDREN: list[int] = []
"""Shared empty list of children: most regions have none."""


# Not frozen: frozen instances take longer to create.
@dataclass(slots=True, eq=False)
class Region:
    """Nodes to outline into one submodule, and nested regions.

    Regions are compared by identity, because they are keys of the result.

    Attributes:
        name: Attribute path of the submodule in its parent module; unique among siblings.
        nodes: Direct nodes in any order, without those of ``children``.
        children: Nested regions.
        always_return_tuple: Return a tuple even for a single output.
        inputs: Outer nodes to pass first in this order, even if unused; other inputs follow. This
            fixes the signature.
        outputs: Inner nodes to return first in this order, even if unused outside.
    """

    name: str
    nodes: Sequence[Node]
    children: Sequence[Region] = ()
    always_return_tuple: bool = False
    inputs: Sequence[Node] = ()
    outputs: Sequence[Node] = ()


@dataclass(slots=True)
class RegionTree:
    """Region tree, flattened in preorder; index 0 is the implicit root.

    Attributes:
        regions: The regions; the root is None.
        parent: Index of each region's parent; -1 for the root.
        depth: Nesting depth of each region.
        children: Indices of each region's children.
        region_of: Innermost region of each node, in graph order; nodes of the root are absent.
        nodes: All nodes of the graph, in order.
        position: Index of each node in the graph.
        members: Direct nodes of each region in graph order; empty for the root.
        first: Least position of any node in each region's subtree.
    """

    regions: list[Region | None]
    parent: list[int]
    depth: list[int]
    children: list[list[int]]
    region_of: dict[Node, int]
    nodes: list[Node]
    position: dict[Node, int]
    members: list[list[Node]] = field(default_factory=list)
    first: list[int] = field(default_factory=list)

    def name(self, index: int) -> str | None:
        """Return the name of a region, or None for the root."""
        region = self.regions[index]
        return None if region is None else region.name


def region_tree(graph: Graph, regions: Sequence[Region]) -> RegionTree:
    """Return the validated, flattened tree of ``regions``.

    Args:
        graph: The graph whose nodes the regions name.

    Raises:
        RegionError: A region is empty, or has a node that is foreign, erased, repeated, in another
            region, a placeholder or the output.
    """
    nodes = list(graph.nodes)
    tree = RegionTree(
        regions=[None],
        parent=[-1],
        depth=[0],
        children=[[]],
        region_of={},
        nodes=nodes,
        position=dict(zip(nodes, range(len(nodes)), strict=True)),
    )
    for region, parent in _preorder(regions):
        _enter(tree, region, parent)
    for index, entered in enumerate(tree.regions):
        if entered is not None:
            _add_members(tree, graph, entered, index)
    _order_members(tree)
    return tree


def _preorder(regions: Sequence[Region]) -> Iterator[tuple[Region, int]]:
    # Explicit stack: a model 300 modules deep must not hit the recursion limit.
    stack = [(region, ROOT) for region in reversed(regions)]
    count = 0
    while stack:
        region, parent = stack.pop()
        count += 1
        yield region, parent
        stack.extend((child, count) for child in reversed(region.children))


def _enter(tree: RegionTree, region: Region, parent: int) -> None:
    index = len(tree.regions)
    tree.regions.append(region)
    tree.parent.append(parent)
    tree.depth.append(tree.depth[parent] + 1)
    tree.children.append([] if region.children else _NO_CHILDREN)
    tree.children[parent].append(index)


def _add_members(tree: RegionTree, graph: Graph, region: Region, index: int) -> None:
    region_of, position = tree.region_of, tree.position
    claimed = len(region_of)
    if not region.nodes and not region.children:
        raise RegionError(
            f"Region {region.name!r} is empty: found no node and no child, expected at least one. "
            "Leave it out."
        )
    for node in region.nodes:
        if node not in position:
            raise _foreign_node_error(node, graph, region.name)
        if node.op in {"placeholder", "output"}:
            raise RegionError(
                f"Region {region.name!r} names {node.name!r}, a {node.op} node; only computing "
                "nodes can be outlined. Remove it from the list."
            )
        other = region_of.setdefault(node, index)
        if other != index:
            raise RegionError(
                f"Node {node.name!r} is in regions {tree.name(other)!r} and {region.name!r}; "
                "a node may be in only one region."
            )
    # ``setdefault`` does not detect a node that one region has twice.
    if len(region_of) - claimed < len(region.nodes):
        twice = next(node for node in region.nodes if list(region.nodes).count(node) > 1)
        raise RegionError(
            f"Region {region.name!r} names {twice.name!r} twice; name each node once."
        )


def _foreign_node_error(node: object, graph: Graph, name: str) -> RegionError:
    if not isinstance(node, Node):
        return RegionError(
            f"Region {name!r} names {node!r}, which is a {type(node).__name__}; expected nodes of "
            "the graph, such as those of gm.graph.find_nodes."
        )
    if node.graph is graph:
        return RegionError(
            f"Region {name!r} names {node.name!r}, which was erased from the graph; expected "
            "nodes of the graph. Collect the list after all edits."
        )
    return RegionError(
        f"Region {name!r} names {node.name!r}, which belongs to another graph; expected nodes of "
        "the graph module that was passed. Was the module copied after the list was made?"
    )


def _order_members(tree: RegionTree) -> None:
    position, region_of = tree.position, tree.region_of
    tree.members = [[] for _ in tree.regions]
    tree.region_of = {node: region_of[node] for node in tree.nodes if node in region_of}
    for node, index in tree.region_of.items():
        tree.members[index].append(node)
    # Reverse preorder: each region is complete before its parent is updated.
    far = len(position)
    tree.first = [far] * len(tree.regions)
    for index in range(len(tree.regions) - 1, 0, -1):
        members = tree.members[index]
        if members:
            tree.first[index] = min(tree.first[index], position[members[0]])
        parent = tree.parent[index]
        tree.first[parent] = min(tree.first[parent], tree.first[index])
