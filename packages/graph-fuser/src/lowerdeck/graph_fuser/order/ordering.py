"""Stable topological order of nodes."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise

from torch.fx import Graph, GraphModule, Node

from lowerdeck.graph_fuser._torch_private import defer_code
from lowerdeck.graph_fuser.errors import CycleError, RegionError
from lowerdeck.graph_fuser.order.hazards import order_hazards
from lowerdeck.torch_base import reads_only_earlier, restore_users

_FRAME = {"placeholder": 0, "output": 2}


def topo_sort(nodes: Sequence[Node]) -> list[Node]:
    """Return ``nodes`` in stable topological order.

    Args:
        nodes: Distinct nodes of one graph, in any order.

    Raises:
        CycleError: The nodes form a dependency cycle.

    Example:
        >>> import torch
        >>> gm = torch.fx.symbolic_trace(lambda x: (x + 1).relu())
        >>> _, add, relu, _ = gm.graph.nodes
        >>> topo_sort([relu, add])
        [add, relu]
    """
    return _sorted(nodes, ())


def legalize_graph(gm: GraphModule) -> GraphModule:
    """Sort the nodes of ``gm`` topologically; return ``gm``.

    As in torch, inputs come first and the output last. Other nodes, including writes, random ops
    and other side effects, keep their order as far as data dependencies allow.

    Args:
        gm: The graph module, changed in place; its code is regenerated at its next use.

    Raises:
        CycleError: The graph has a dependency cycle; ``gm`` is unchanged. It is a
            ``RuntimeError``, as torch raises here.

    Example:
        >>> import torch
        >>> gm = torch.fx.symbolic_trace(lambda x: (x + 1).relu())
        >>> _, add, relu, _ = gm.graph.nodes
        >>> relu.append(add)
        >>> [node.name for node in legalize_graph(gm).graph.nodes]
        ['x', 'add', 'relu', 'output']
    """
    nodes = list(gm.graph.nodes)
    if _is_framed(gm.graph, nodes) and reads_only_earlier(nodes):
        return gm
    restore_users(gm.graph)
    # Stable; a single pass if the nodes are already sorted.
    legal = sorted(nodes, key=lambda node: _FRAME.get(node.op, 1))
    if not reads_only_earlier(legal):
        legal = _sorted(legal, order_hazards(gm.graph, gm))
    relink(legal)
    defer_code(gm)
    return gm


def check_legal(graph: Graph) -> None:
    """Raise ``RegionError`` unless every node comes after the nodes that it reads."""
    nodes = list(graph.nodes)
    # Called by every entry point: the common case is one cheap pass.
    if reads_only_earlier(nodes):
        return
    seen: set[Node] = set()
    for node in nodes:
        late = next((source for source in node.all_input_nodes if source not in seen), None)
        if late is not None:
            raise RegionError(
                f"Node {node.name!r} comes before {late.name!r}, which it reads; expected the "
                "opposite order. Call legalize_graph first."
            )
        seen.add(node)


def relink(nodes: Sequence[Node]) -> None:
    """Reorder a contiguous range of graph nodes to match ``nodes``.

    Args:
        nodes: The nodes of the range in their new order; nodes already in place are not moved.
    """
    members = set(nodes)
    # The first node of the range may not be first in the new order.
    start = nodes[0]
    while start.prev in members:
        start = start.prev
    cursor = start.prev
    for node in nodes:
        if cursor.next is not node:
            cursor.append(node)
        cursor = node


def _is_framed(graph: Graph, nodes: list[Node]) -> bool:
    """Return whether the inputs come first and the output last, in O(inputs)."""
    inputs = graph.find_nodes(op="placeholder", sort=False)
    outputs = graph.find_nodes(op="output", sort=False)
    return set(nodes[: len(inputs)]) == set(inputs) and outputs in ([], nodes[-1:])


def _sorted(nodes: Sequence[Node], hazards: Iterable[tuple[Node, Node]]) -> list[Node]:
    """Return the stable topological order of ``nodes`` by Kahn's algorithm.

    Among ready nodes, the earliest in ``nodes`` is next. ``hazards`` pairs (before, after) are
    dropped if they contradict data dependencies.
    """
    position = {node: number for number, node in enumerate(nodes)}
    effects: dict[Node, list[Node]] = {}
    for first, second in hazards:
        effects.setdefault(second, []).append(first)
    before = {
        node: [
            source
            for source in (*node.all_input_nodes, *effects.get(node, ()))
            if source in position
        ]
        for node in nodes
    }
    after: dict[Node, list[Node]] = {node: [] for node in nodes}
    for node, sources in before.items():
        for source in sources:
            after[source].append(node)
    waits = {node: len(sources) for node, sources in before.items()}
    ready = [position[node] for node, count in waits.items() if not count]
    done: dict[Node, None] = {}
    while len(done) < len(nodes):
        # In an unsorted graph, hazards may contradict data dependencies, which take precedence.
        if not ready:
            first, second = _cyclic_hazard(before, done)
            before[second].remove(first)
            after[first].remove(second)
            waits[second] -= 1
            ready = [] if waits[second] else [position[second]]
            continue
        node = nodes[heapq.heappop(ready)]
        done[node] = None
        for target in after[node]:
            waits[target] -= 1
            if not waits[target]:
                heapq.heappush(ready, position[target])
    return list(done)


def _cyclic_hazard(
    before: Mapping[Node, Sequence[Node]], done: Collection[Node]
) -> tuple[Node, Node]:
    """Return a hazard pair on a dependency cycle.

    Raises:
        CycleError: The cycle consists of data dependencies only.
    """
    # Every remaining node has a remaining predecessor: the walk must revisit a node.
    walk = dict.fromkeys([next(node for node in before if node not in done)])
    while True:
        source = next(node for node in before[next(reversed(walk))] if node not in done)
        if source in walk:
            break
        walk[source] = None
    path = list(walk)
    path = [*path[path.index(source) :], source][::-1]
    for first, second in pairwise(path):
        if first not in second.all_input_nodes:
            return first, second
    names = " -> ".join(node.name for node in path)
    raise CycleError(
        f"The graph has a dependency cycle: {names}. Undo the edit that created it.",
        tuple(path),
        (None,) * len(path),
    )
