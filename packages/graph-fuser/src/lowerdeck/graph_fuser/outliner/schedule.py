"""Topological order of each body's nodes and calls (Kahn's algorithm).

A region's call takes the position of the region's first node. If a dependency then comes after its
user, the range between the two is re-sorted; among ready items, the one with the least position is
next. A node moves only if it precedes a new dependency.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from typing import NamedTuple

from torch.fx import Node

from lowerdeck.graph_fuser.outliner.boundary import Edges, Item
from lowerdeck.graph_fuser.outliner.cycles import cycle_error
from lowerdeck.graph_fuser.regions import ROOT, RegionTree


class Stretch(NamedTuple):
    """A range of a body that is reordered.

    Attributes:
        low: Least position of its items.
        high: Greatest position of its items.
        items: Its items in their new order.
    """

    low: int
    high: int
    items: list[Item]


class Schedule:
    """Order of all bodies.

    Args:
        edges: Each body's ordering constraints that involve a region.
        order: Node pairs whose order must be preserved without a data dependency.

    Raises:
        CycleError: A region would depend on itself.
    """

    def __init__(
        self, tree: RegionTree, edges: Sequence[Edges], order: Sequence[tuple[Node, Node]] = ()
    ) -> None:
        self.tree = tree
        self.following: dict[Node, list[Node]] = {}
        for before, after in order:
            self.following.setdefault(before, []).append(after)
        self.stretches: list[Stretch | None] = [
            self._stretch(index, edges[index]) for index in range(len(tree.regions))
        ]

    def position(self, item: Item) -> int:
        """Return an item's position in the original graph, unique within a body."""
        return self.tree.first[item] if isinstance(item, int) else self.tree.position[item]

    def body(self, index: int, nodes: Sequence[Node]) -> Sequence[Item]:
        """Return the items of a body in their final order.

        Args:
            nodes: Direct nodes of the body, or a subset, in graph order.
        """
        children = self.tree.children[index]
        # A body without calls keeps the graph's topological order.
        if not children:
            return nodes
        items: list[Item] = [*nodes, *children]
        items.sort(key=self.position)
        stretch = self.stretches[index]
        if stretch is not None:
            low = bisect_left(items, stretch.low, key=self.position)
            high = bisect_right(items, stretch.high, key=self.position)
            # ``nodes`` may be a subset of the sorted nodes.
            kept = set(items[low:high])
            items[low:high] = [item for item in stretch.items if item in kept]
        return items

    def calls(self) -> list[int]:
        """Return the outermost regions in the order of their calls."""
        children = sorted(self.tree.children[ROOT], key=self.position)
        stretch = self.stretches[ROOT]
        if stretch is not None:
            low = bisect_left(children, stretch.low, key=self.position)
            high = bisect_right(children, stretch.high, key=self.position)
            children[low:high] = [item for item in stretch.items if isinstance(item, int)]
        return children

    def _stretch(self, index: int, edges: Edges) -> Stretch | None:
        broken = [
            (self.position(target), self.position(source))
            for source, target in edges
            if self.position(source) > self.position(target)
        ]
        if not broken:
            return None
        # Each cycle has an edge back to its first item and one from its last: it is in this range.
        low, high = min(low for low, _ in broken), max(high for _, high in broken)
        return Stretch(low, high, self._sorted(index, edges, low, high))

    def _sorted(self, index: int, edges: Edges, low: int, high: int) -> list[Item]:
        """Sort the items of a body between two positions."""
        tree = self.tree
        item_at: dict[int, Item] = {
            tree.position[node]: node
            for node in tree.nodes[low : high + 1]
            if tree.region_of.get(node, ROOT) == index
        }
        children = tree.children[index]
        item_at |= {
            tree.first[child]: child for child in children if low <= tree.first[child] <= high
        }
        after = self._successors(index, edges, item_at.values())
        waits = dict.fromkeys(after, 0)
        for targets in after.values():
            for target in targets:
                waits[target] += 1
        # Kahn's algorithm; a heap of old positions makes it stable.
        ready = [position for position, item in item_at.items() if not waits[item]]
        heapq.heapify(ready)
        done: list[Item] = []
        while ready:
            item = item_at[heapq.heappop(ready)]
            done.append(item)
            for target in after[item]:
                waits[target] -= 1
                if not waits[target]:
                    heapq.heappush(ready, self.position(target))
        # The remaining items are on a cycle or depend on one.
        if len(done) < len(item_at):
            stuck = {item for item, count in waits.items() if count}
            raise cycle_error(tree, edges, after, stuck)
        return done

    def _successors(
        self, index: int, edges: Edges, items: Collection[Item]
    ) -> dict[Item, list[Item]]:
        after: dict[Item, list[Item]] = {item: [] for item in items}
        for item in items:
            # ``edges`` has only edges that involve a region, not those between two nodes.
            if not isinstance(item, int):
                readers = (*item.users, *self.following.get(item, ()))
                after[item] = [
                    user
                    for user in readers
                    if user in after and self.tree.region_of.get(user, ROOT) == index
                ]
        for source, target in edges:
            if source in after and target in after:
                after[source].append(target)
        return after
