"""Stable orders of nodes."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from torch.fx import Graph, Node

from lowerdeck.graph_fuser.errors import CycleError


def topo_sort(nodes: Sequence[Node]) -> list[Node]:
    """Return ``nodes`` so that each stands behind those it reads; otherwise in the order given.

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
    place = {node: index for index, node in enumerate(nodes)}
    waits = {node: sum(source in place for source in node.all_input_nodes) for node in place}
    ready = [place[node] for node, count in waits.items() if not count]
    heapq.heapify(ready)
    by_place = list(nodes)
    done: list[Node] = []
    while ready:
        node = by_place[heapq.heappop(ready)]
        done.append(node)
        for user in node.users:
            if user in place:
                waits[user] -= 1
                if not waits[user]:
                    heapq.heappush(ready, place[user])
    if len(done) != len(place):
        raise _circle([node for node, count in waits.items() if count])
    return done


def legal_order(graph: Graph) -> list[Node]:
    """Return the nodes of ``graph``, moved only where one stands before what it reads.

    Args:
        graph: The graph; not changed.

    Raises:
        CycleError: The graph reads its own results in a circle.
    """
    nodes = list(graph.nodes)
    seen: set[Node] = set()
    for node in nodes:
        if not seen.issuperset(node.all_input_nodes):
            return topo_sort(nodes)
        seen.add(node)
    return nodes


def _circle(stuck: Sequence[Node]) -> CycleError:
    members = dict.fromkeys(stuck)
    walk = [stuck[0]]
    seen = {stuck[0]: 0}
    while True:
        # Every stuck node reads another stuck one, so that the walk must come back.
        source = next(node for node in walk[-1].all_input_nodes if node in members)
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
