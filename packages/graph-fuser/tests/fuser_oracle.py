"""An independent judge of partitions: slow, plain reachability over the graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from torch.fx import Graph, Node


def reaches(starts: Iterable[Node], after: Mapping[Node, Sequence[Node]]) -> set[Node]:
    """Return every node that can be reached from ``starts``, themselves included."""
    seen: set[Node] = set()
    work = list(starts)
    while work:
        node = work.pop()
        if node not in seen:
            seen.add(node)
            work.extend(after.get(node, ()))
    return seen


def contracted(
    graph: Graph,
    partitions: Sequence[Sequence[Node]],
    extra: Iterable[tuple[Node, Node]] = (),
) -> dict[object, set[object]]:
    """Return the edges of the graph with each partition shrunk to one vertex (its number)."""
    region_of: dict[Node, object] = {
        node: number for number, nodes in enumerate(partitions) for node in nodes
    }
    edges: dict[object, set[object]] = {region_of.get(node, node): set() for node in graph.nodes}
    pairs = [(node, user) for node in graph.nodes for user in node.users]
    for node, user in [*pairs, *extra]:
        source, target = region_of.get(node, node), region_of.get(user, user)
        if source != target or node is user:
            edges[source].add(target)
    return edges


def is_acyclic(edges: Mapping[object, set[object]]) -> bool:
    """Return whether vertices without predecessors can be taken away until none is left."""
    count = dict.fromkeys(edges, 0)
    for targets in edges.values():
        for target in targets:
            count[target] += 1
    free = [vertex for vertex, number in count.items() if not number]
    taken = 0
    while free:
        vertex = free.pop()
        taken += 1
        for target in edges[vertex]:
            count[target] -= 1
            if not count[target]:
                free.append(target)
    return taken == len(edges)


def border(partitions: Iterable[Iterable[Node]]) -> int:
    """Return how many values enter and leave partitions, over all of them."""
    total = 0
    for nodes in partitions:
        inside = set(nodes)
        total += len({n for node in inside for n in node.all_input_nodes if n not in inside})
        total += sum(any(user not in inside for user in node.users) for node in inside)
    return total


def is_true_cycle(
    path: Sequence[Node],
    regions: Sequence[str | None],
    region_of: Mapping[Node, str],
    extra: Iterable[tuple[Node, Node]] = (),
) -> bool:
    """Return whether ``path`` leaves its first region, and comes back to it over real edges."""
    ordered = set(extra)
    if len(path) < 3 or regions[0] is None or regions[0] != regions[-1]:
        return False
    if [region_of.get(node) for node in path] != list(regions):
        return False
    for node, other in pairwise(path):
        tied = region_of.get(node) is not None and region_of.get(node) == region_of.get(other)
        if not (other in node.users or (node, other) in ordered or tied):
            return False
    return any(region != regions[0] for region in regions)
