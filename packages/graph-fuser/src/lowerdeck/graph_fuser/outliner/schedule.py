"""Order of each body's nodes and calls, found by Kahn's algorithm.

A region's call takes the position of the region's first node. Where a value or an effect then
comes too late for what needs it, the stretch between the two is sorted again: of the items that
are ready the one with the least position is next. So a node moves only if it comes before
something that it now depends on.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch.fx import Node

from lowerdeck.graph_fuser.outliner.boundary import Edges, Item
from lowerdeck.graph_fuser.outliner.cycles import cycle_error
from lowerdeck.graph_fuser.regions import ROOT, RegionTree


@dataclass(frozen=True, slots=True)
class Stretch:
    """The part of a body whose order changes.

    Attributes:
        low: The least position of an item in it.
        items: Its items in their new order.
    """

    low: int
    high: int
    items: list[Item]


class Schedule:
    """The order of all bodies.

    Args:
        edges: For each region the precedences of its body at regions.
        order: Pairs of nodes that must keep their order though no value flows between them.

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
        """Return where an item is in the graph as it was; no two items of a body are alike."""
        return self.tree.first[item] if isinstance(item, int) else self.tree.position[item]

    def body(self, index: int, nodes: Sequence[Node]) -> Sequence[Item]:
        """Return the items of a body in their final order.

        Args:
            nodes: Its own nodes, or some of them, in the graph's order.
        """
        children = self.tree.children[index]
        # Without calls a body keeps the graph's order, which is legal.
        if not children:
            return nodes
        items: list[Item] = [*nodes, *children]
        items.sort(key=self.position)
        stretch = self.stretches[index]
        if stretch is not None:
            low = bisect_left(items, stretch.low, key=self.position)
            high = bisect_right(items, stretch.high, key=self.position)
            # ``nodes`` may be only some of the nodes that were sorted.
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
        # A circle has a broken pair at its last item and one at its first, so it is inside.
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
        # What is left is on a cycle, or after one.
        if len(done) < len(item_at):
            stuck = {item for item, count in waits.items() if count}
            raise cycle_error(tree, edges, after, stuck)
        return done

    def _successors(
        self, index: int, edges: Edges, items: Collection[Item]
    ) -> dict[Item, list[Item]]:
        after: dict[Item, list[Item]] = {item: [] for item in items}
        for item in items:
            # Edges at regions are in ``edges``, those between two nodes of the body are not.
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
