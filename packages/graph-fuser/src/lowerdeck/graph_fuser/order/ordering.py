"""Stable orders of nodes."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from lowerdeck.graph_fuser._torch_private import defer_code
from lowerdeck.graph_fuser.errors import CycleError
from lowerdeck.graph_fuser.order.components import strong_components
from lowerdeck.graph_fuser.order.hazards import order_hazards
from lowerdeck.graph_fuser.regions import Region, RegionTree, region_tree
from lowerdeck.torch_base import mend_readers, reads_only_earlier

_FRAME = {"placeholder": 0, "output": 2}


def topo_sort(nodes: Sequence[Node]) -> list[Node]:
    """Return ``nodes`` so that each comes after those it reads; otherwise in the order given.

    Args:
        nodes: Nodes of one graph, each once, in any order.

    Raises:
        CycleError: The nodes read each other in a circle.

    Example:
        >>> import torch
        >>> gm = torch.fx.symbolic_trace(lambda x: (x + 1).relu())
        >>> _, add, relu, _ = gm.graph.nodes
        >>> topo_sort([relu, add])
        [add, relu]
    """
    return _sorted(nodes, {})


def legalize_graph(gm: GraphModule) -> GraphModule:
    """Move the nodes of ``gm`` that come before what they read to after it, and return ``gm``.

    Inputs come first and the output last, as torch's function leaves them. A graph that is so
    already stays as it is, node for node. In another one, too, nodes keep their order as far as it
    is possible, and so do writes, random draws and other effects.

    Args:
        gm: The graph module, changed in place; its code is generated again at its next use.

    Raises:
        CycleError: The graph reads its own results in a circle. ``gm`` is as before. As torch
            raises ``RuntimeError`` here, it is one.

    Example:
        >>> import torch
        >>> gm = torch.fx.symbolic_trace(lambda x: (x + 1).relu())
        >>> _, add, relu, _ = gm.graph.nodes
        >>> relu.append(add)
        >>> [node.name for node in legalize_graph(gm).graph.nodes]
        ['x', 'add', 'relu', 'output']
    """
    nodes = list(gm.graph.nodes)
    # Nearly every graph is in order: that is seen from what nodes read, without asking who reads
    # them, and so without mending that first.
    if _is_framed(gm.graph, nodes) and reads_only_earlier(nodes):
        return gm
    mend_readers(gm.graph)
    framed = _framed(nodes)
    if is_legal(framed):
        if framed != nodes:
            relink(framed)
            defer_code(gm)
        return gm
    relink(_sorted(framed, _compatible(framed, order_hazards(gm.graph, gm))))
    defer_code(gm)
    return gm


def legal_order(
    graph: Graph, module: torch.nn.Module | None
) -> tuple[list[Node], list[tuple[Node, Node]]]:
    """Return the nodes in the order that they run in, and what holds them there beside values.

    A node that comes before what it reads runs where ``legalize_graph`` would put it.

    Args:
        graph: The graph; not changed.
        module: The module that holds what the graph's nodes name.

    Returns:
        The nodes, and the pairs that must keep that order though no value flows between them.

    Raises:
        CycleError: The graph reads its own results in a circle.
    """
    nodes = _framed(list(graph.nodes))
    hazards = order_hazards(graph, module)
    if reads_only_earlier(nodes) or is_legal(nodes):
        return nodes, hazards
    # Where values demand another order than these pairs, values win.
    nodes = _sorted(nodes, _compatible(nodes, hazards))
    return nodes, order_hazards(graph, module, nodes) if hazards else []


def ordered_tree(
    graph: Graph,
    module: torch.nn.Module | None,
    regions: Sequence[Region],
    *,
    rebuilds_root: bool = False,
) -> tuple[RegionTree, list[tuple[Node, Node]]]:
    """Return the tree of ``regions`` in the order that the graph runs in, and what holds it so.

    Args:
        graph: The graph; not changed.
        module: The module that holds what the graph's nodes name.
        regions: The outermost regions.
        rebuilds_root: Whether the outermost graph is to be built anew, node by node.

    Raises:
        CycleError: The graph reads its own results in a circle.
        RegionError: See ``region_tree``.
    """
    tree, hazards = region_tree(graph, regions), order_hazards(graph, module)
    # Without effects any order that values allow is right, and nodes may stay where they are.
    if not (hazards or rebuilds_root) or is_legal(list(tree.position)):
        return tree, hazards
    nodes, hazards = legal_order(graph, module)
    return region_tree(graph, regions, nodes), hazards


def _framed(nodes: list[Node]) -> list[Node]:
    """Return ``nodes`` with the inputs in front and the output at the end; otherwise as given."""
    # Stable, and a single pass over what is in order already.
    return sorted(nodes, key=lambda node: _FRAME.get(node.op, 1))


def _is_framed(graph: Graph, nodes: list[Node]) -> bool:
    """Return whether the inputs are in front and the output is last; O(inputs)."""
    inputs = graph.find_nodes(op="placeholder", sort=False)
    outputs = graph.find_nodes(op="output", sort=False)
    return set(nodes[: len(inputs)]) == set(inputs) and outputs in ([], nodes[-1:])


def is_legal(nodes: Sequence[Node]) -> bool:
    """Return whether no node comes before, or at, another one of ``nodes`` that it reads.

    Args:
        nodes: Nodes of one graph, each once; what else they read does not count.
    """
    seen: set[Node] = set()
    add, is_disjoint = seen.add, seen.isdisjoint
    for node in nodes:
        add(node)
        # Readers rather than what is read: torch holds them in a dict, and lists the others anew.
        if not is_disjoint(node.users):
            return False
    return True


def relink(nodes: Sequence[Node]) -> None:
    """Bring ``nodes``, which are in one stretch of their graph, into this order.

    Args:
        nodes: The nodes of the stretch; those already in place are not touched.
    """
    members = set(nodes)
    start = nodes[0]
    while start.prev in members:
        start = start.prev
    cursor = start.prev
    for node in nodes:
        if cursor.next is not node:
            cursor.append(node)
        cursor = node


def _compatible(
    nodes: Sequence[Node], hazards: Sequence[tuple[Node, Node]]
) -> dict[Node, list[Node]]:
    """Return the pairs that values allow: where values demand another order, they win."""
    if not hazards:
        return {}
    position_of = {node: number for number, node in enumerate(nodes)}
    after = [[position_of[user] for user in node.users] for node in nodes]
    for first, second in hazards:
        after[position_of[first]].append(position_of[second])
    part = [0] * len(nodes)
    for number, component in enumerate(strong_components(len(nodes), after)):
        for member in component:
            part[member] = number
    following: dict[Node, list[Node]] = {}
    for first, second in hazards:
        if part[position_of[first]] != part[position_of[second]]:
            following.setdefault(first, []).append(second)
    return following


def _sorted(nodes: Sequence[Node], following: Mapping[Node, Sequence[Node]]) -> list[Node]:
    """Return a stable order in which values, and the pairs in ``following``, come in turn."""
    position_of = {node: index for index, node in enumerate(nodes)}
    waits = {
        node: sum(source in position_of for source in node.all_input_nodes) for node in position_of
    }
    for targets in following.values():
        for target in targets:
            waits[target] += 1
    ready = [position_of[node] for node, count in waits.items() if not count]
    heapq.heapify(ready)
    by_position = list(nodes)
    done: list[Node] = []
    while ready:
        node = by_position[heapq.heappop(ready)]
        done.append(node)
        for user in (*node.users, *following.get(node, ())):
            if user in position_of:
                waits[user] -= 1
                if not waits[user]:
                    heapq.heappush(ready, position_of[user])
    if len(done) != len(position_of):
        raise _circle([node for node, count in waits.items() if count], following)
    return done


def _circle(stuck: Sequence[Node], following: Mapping[Node, Sequence[Node]]) -> CycleError:
    before: dict[Node, list[Node]] = {node: [] for node in stuck}
    for node in stuck:
        for target in (*node.users, *following.get(node, ())):
            if target in before:
                before[target].append(node)
    walk = [stuck[0]]
    seen = {stuck[0]: 0}
    while True:
        # Every stuck node reads another stuck one, so that the walk must come back.
        source = before[walk[-1]][0]
        if source in seen:
            path = (*walk[seen[source] :], source)[::-1]
            break
        seen[source] = len(walk)
        walk.append(source)
    names = " -> ".join(node.name for node in path)
    return CycleError(
        f"The graph reads its own results in a circle: {names}. Undo the edit that closed it.",
        tuple(path),
        (None,) * len(path),
    )
