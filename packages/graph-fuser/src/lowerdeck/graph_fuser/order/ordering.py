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
    return _sorted(nodes, ())


def legalize_graph(gm: GraphModule) -> GraphModule:
    """Move the nodes of ``gm`` that come before what they read to after it, and return ``gm``.

    Inputs come first and the output last, as torch's function leaves them. Other nodes keep their
    order as far as values allow, and so do writes, random draws and other effects.

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
    if _is_framed(gm.graph, nodes) and reads_only_earlier(nodes):
        return gm
    restore_users(gm.graph)
    # Stable, and a single pass over what is in order already.
    legal = sorted(nodes, key=lambda node: _FRAME.get(node.op, 1))
    if not reads_only_earlier(legal):
        legal = _sorted(legal, order_hazards(gm.graph, gm))
    relink(legal)
    defer_code(gm)
    return gm


def check_legal(graph: Graph) -> None:
    """Raise ``RegionError`` unless every node comes after the nodes that it reads."""
    nodes = list(graph.nodes)
    # Every entry point asks, so that the common case is one cheap pass.
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
    """Bring ``nodes``, which are in one stretch of their graph, into this order.

    Args:
        nodes: The nodes of the stretch; those already in place are not touched.
    """
    members = set(nodes)
    # The first node of the stretch may not be the first of the new order.
    start = nodes[0]
    while start.prev in members:
        start = start.prev
    cursor = start.prev
    for node in nodes:
        if cursor.next is not node:
            cursor.append(node)
        cursor = node


def _is_framed(graph: Graph, nodes: list[Node]) -> bool:
    """Return whether the inputs are in front and the output is last; O(inputs)."""
    inputs = graph.find_nodes(op="placeholder", sort=False)
    outputs = graph.find_nodes(op="output", sort=False)
    return set(nodes[: len(inputs)]) == set(inputs) and outputs in ([], nodes[-1:])


def _sorted(nodes: Sequence[Node], hazards: Iterable[tuple[Node, Node]]) -> list[Node]:
    """Return the stable topological order of ``nodes`` by Kahn's algorithm.

    Of the nodes that are ready the one that comes first in ``nodes`` is next. A pair of
    ``hazards`` (before, after) holds unless values demand the opposite.
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
        # Hazards may contradict values in a graph that is out of order: values win.
        if not ready:
            first, second = _pair_against_values(before, done)
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


def _pair_against_values(
    before: Mapping[Node, Sequence[Node]], done: Collection[Node]
) -> tuple[Node, Node]:
    """Return a pair on a circle of nodes that wait for each other between which no value flows.

    Raises:
        CycleError: There is none: values alone form a circle.
    """
    # Each node that is left waits for another one, so that the walk comes back.
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
        f"The graph reads its own results in a circle: {names}. Undo the edit that closed it.",
        tuple(path),
        (None,) * len(path),
    )
