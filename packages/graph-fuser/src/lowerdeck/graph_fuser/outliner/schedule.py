"""The order of every body: nodes stay in place, calls settle where they fit, and cycles are found.

A region's call starts at the position of its first node and slides to just after its last input.
Where that suits all readers nothing else moves. Where a reader comes before an input, only the
nodes between those two are sorted again, stably: a node moves only if it comes before something
that it now depends on.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch.fx import Node

from lowerdeck.graph_fuser.errors import CycleError
from lowerdeck.graph_fuser.order import is_legal
from lowerdeck.graph_fuser.outliner.anchors import anchored, stride
from lowerdeck.graph_fuser.outliner.boundary import Boundary, Item
from lowerdeck.graph_fuser.outliner.cycles import cycle_error, shortest_loop
from lowerdeck.graph_fuser.regions import ROOT, RegionTree


@dataclass(slots=True)
class Body:
    """The order of one region's items.

    Attributes:
        key: The order of the called regions, no two alike; a node's is
            ``position * stride``.
        windows: Stretches whose order changes: first key, last key, items in their new order.
    """

    key: dict[int, int]
    windows: list[tuple[int, int, list[Item]]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The order of all bodies.

    Attributes:
        stride: Distance between the keys of neighbouring nodes, so that calls fit between them.
        bodies: One for each region of the tree.
    """

    stride: int
    bodies: list[Body]


def schedule(
    tree: RegionTree, boundary: Boundary, order: Sequence[tuple[Node, Node]] = ()
) -> Schedule:
    """Return an order for every body in which each value is made before it is read.

    Args:
        tree: The regions.
        boundary: What crosses their borders.
        order: Pairs of nodes that must keep their order though no value flows between them.

    Raises:
        CycleError: A region would depend on itself.
    """
    following: dict[Node, list[Node]] = {}
    for before, after in order:
        following.setdefault(before, []).append(after)
    planner = _Planner(tree, boundary, following)
    return Schedule(planner.stride, [planner.plan(index) for index in range(len(tree.regions))])


def body_order(tree: RegionTree, plan: Schedule, index: int, nodes: Sequence[Node]) -> list[Item]:
    """Return all items of a body in their final order.

    Args:
        tree: The regions.
        plan: Its schedule.
        index: The region.
        nodes: The nodes that are directly in it, in the graph's order.
    """
    body = plan.bodies[index]
    if not body.key and not body.windows:
        return list(nodes)
    keyed: list[tuple[int, Item]] = [(tree.position[node] * plan.stride, node) for node in nodes]
    if body.key:
        keyed.extend((key, child) for child, key in body.key.items())
        keyed.sort(key=lambda pair: pair[0])
    result: list[Item] = []
    start = 0
    keys = [key for key, _ in keyed] if body.windows else []
    for low, high, items in body.windows:
        while keys[start] < low:
            result.append(keyed[start][1])
            start += 1
        result.extend(items)
        start = bisect_right(keys, high, start)
    result.extend(item for _, item in keyed[start:])
    return result


class _Planner:
    def __init__(
        self, tree: RegionTree, boundary: Boundary, order: Mapping[Node, Sequence[Node]]
    ) -> None:
        self.tree = tree
        self.edges = boundary.edges
        self.order = order
        self.stride = stride(tree)
        self.nodes_in_order = list(tree.position)

    def plan(self, index: int) -> Body:
        children = self.tree.children[index]
        if not children and (index == ROOT or is_legal(self.tree.members[index])):
            return Body({})
        body = Body(anchored(self.tree, children, self.edges[index]))
        broken = self._broken(index, body)
        # Only stretches with a broken precedence are sorted: elsewhere the user's order stays, and
        # the whole costs no more than the stretches are long.
        for low, high in _merged(broken):
            body.windows.append((low, high, self._settle(index, body, low, high)))
        return body

    def _key(self, item: Item, key: Mapping[int, int]) -> int:
        return key[item] if isinstance(item, int) else self.tree.position[item] * self.stride

    def _broken(self, index: int, body: Body) -> Iterator[tuple[int, int]]:
        """Yield the stretch between the two ends of each precedence that does not hold."""
        for source, target in self.edges[index]:
            first, second = self._key(source, body.key), self._key(target, body.key)
            if first >= second:
                yield second, first
        if index == ROOT or is_legal(self.tree.members[index]):
            return
        position, region_of = self.tree.position, self.tree.region_of
        for node in self.tree.members[index]:
            for source_node in node.all_input_nodes:
                if region_of.get(source_node) == index and position[source_node] >= position[node]:
                    yield position[node] * self.stride, position[source_node] * self.stride

    def _settle(self, index: int, body: Body, low: int, high: int) -> list[Item]:
        """Sort one stretch: always the earliest item whose predecessors have all come."""
        region_of = self.tree.region_of
        stretch = self.nodes_in_order[-(-low // self.stride) : high // self.stride + 1]
        key: dict[Item, int] = {
            node: self.tree.position[node] * self.stride
            for node in stretch
            if region_of.get(node, ROOT) == index
        }
        key.update((child, at) for child, at in body.key.items() if low <= at <= high)
        after = self._successors(index, key)
        waits = dict.fromkeys(key, 0)
        for targets in after.values():
            for target in targets:
                waits[target] += 1
        by_key = {at: item for item, at in key.items()}
        ready = [at for item, at in key.items() if not waits[item]]
        # The earliest first: of all legal orders the one nearest to the user's, and always the
        # same.
        heapq.heapify(ready)
        result: list[Item] = []
        while ready:
            item = by_key[heapq.heappop(ready)]
            result.append(item)
            for target in after[item]:
                waits[target] -= 1
                if not waits[target]:
                    heapq.heappush(ready, key[target])
        if len(result) != len(key):
            raise self._cycle(index, after, {item for item, count in waits.items() if count})
        return result

    def _successors(self, index: int, key: Mapping[Item, int]) -> dict[Item, list[Item]]:
        after: dict[Item, list[Item]] = {item: [] for item in key}
        region_of = self.tree.region_of
        for item in key:
            if isinstance(item, int):
                continue
            for user in (*item.users, *self.order.get(item, ())):
                if region_of.get(user, ROOT) == index and user in key:
                    after[item].append(user)
        for source, target in self.edges[index]:
            if source in key and target in key:
                after[source].append(target)
        return after

    def _cycle(
        self, index: int, after: Mapping[Item, Sequence[Item]], stuck: set[Item]
    ) -> CycleError:
        loop = shortest_loop(after, stuck)
        path: list[Node] = []
        for source, target in zip(loop, [*loop[1:], loop[0]], strict=True):
            if isinstance(source, int) or isinstance(target, int):
                path.extend(self.edges[index][source, target])
            else:
                path.extend((source, target))
        # Each node that is the end of one edge and the start of the next appears twice.
        steps = [
            node for number, node in enumerate(path) if not number or node is not path[number - 1]
        ]
        names = tuple(self.tree.name(self.tree.region_of.get(node, ROOT)) for node in steps)
        return cycle_error(steps, names)


def _merged(stretches: Iterator[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(stretches):
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return merged
