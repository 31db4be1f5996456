"""Levels for partitions whose parts all exchange values: as few connected ones as can be found.

``spread`` makes few levels, and a level may hold several parts that have nothing to do with each
other. Here the number of levels does not matter and that of connected parts does: items are taken
from the last to the first, each at the greatest level that its readers leave it, and parts that
then read one item at different levels are brought to one, with all that comes before them. The
rules of ``levels`` hold throughout, so that the parts can never need each other in a circle.

Every step of torch's partitioner without horizontal fusion (a node joins the parts that read it)
is one that is tried here. The search is bounded, so that the cost is linear; where the bound is
met a part stays where it is.
"""

from __future__ import annotations

from collections.abc import Iterator

from lowerdeck.graph_fuser.proposer.items import ItemGraph
from lowerdeck.graph_fuser.proposer.levels import border_values

_REACH = 128
"""How many items one step may move. On 8,000 nodes with long edges, 512 took six times as long and
made no fewer parts; of graphs of up to 60 nodes no step needs more."""


def fewest_connected(items: ItemGraph, level: list[int]) -> list[tuple[int, int]]:
    """Return for each item its level and a number for the connected part of it that holds it.

    Args:
        items: The items.
        level: Levels that hold; those found here are taken where they make fewer connected parts,
            or as many with fewer values across their borders.
    """
    found = _Gatherer(items).levels()
    ours, theirs = connected(items, found), connected(items, level)
    return min(theirs, ours, key=lambda part: _cost(items, part))


def connected(items: ItemGraph, level: list[int]) -> list[tuple[int, int]]:
    """Return for each item its level, and a number for the part of that level that holds it."""
    part = [-1] * len(level)
    for start in range(len(level)):
        if part[start] >= 0 or not items.wanted[start]:
            continue
        part[start] = start
        work = [start]
        while work:
            item = work.pop()
            # Pairs that must keep their order count too: they could tie two parts into a circle.
            for other in (*items.before[item], *items.after[item]):
                if part[other] < 0 and items.wanted[other] and level[other] == level[item]:
                    part[other] = start
                    work.append(other)
    return list(zip(level, part, strict=True))


def _cost(items: ItemGraph, part: list[tuple[int, int]]) -> tuple[int, int]:
    numbers = [number for _, number in part]
    count = len({number for number, inside in zip(numbers, items.wanted, strict=True) if inside})
    return count, border_values(items, numbers)


class _Gatherer:
    """Finds the levels; the members of one group move as one."""

    def __init__(self, items: ItemGraph) -> None:
        self.items = items
        count = len(items.nodes)
        self.level = [0] * count
        self.group_of = list(range(count))
        self.members = [[item] for item in range(count)]
        # Items before it have no level yet, and no say.
        self.reached = count

    def levels(self) -> list[int]:
        """Return the levels."""
        items, level = self.items, self.level
        for item in range(len(level) - 1, -1, -1):
            self.reached = item
            level[item] = self._ceiling(item)
            if items.wanted[item]:
                self._gather(item, items.after[item])
        # What could not be joined when it was met may be since.
        for item in range(len(level)):
            if items.wanted[item]:
                self._gather(item, items.after[item])
        return level

    def _ceiling(self, item: int) -> int:
        """Return the greatest level that what comes after ``item`` leaves it."""
        items, level = self.items, self.level
        is_in = items.wanted
        bounds = [level[target] - self._step(item, target) for target in items.after[item]]
        bounds += [level[target] - 1 for target in items.apart.get(item, ())]
        return min(bounds, default=0 if is_in[item] else 1)

    def _step(self, source: int, target: int) -> int:
        """Return by how much the level must rise from one item to the next."""
        return int(self.items.wanted[source] and not self.items.wanted[target])

    def _gather(self, item: int, readers: list[int]) -> None:
        """Join the parts that read ``item`` to its own, where no path keeps them apart."""
        level, group_of = self.level, self.group_of
        for reader in readers:
            if not self.items.wanted[reader] or group_of[reader] == group_of[item]:
                continue
            if level[reader] == level[item] or self._lower(
                group_of[reader], level[item], group_of[item]
            ):
                self._join(group_of[item], group_of[reader])

    def _join(self, first: int, second: int) -> None:
        if len(self.members[first]) < len(self.members[second]):
            first, second = second, first
        for item in self.members[second]:
            self.group_of[item] = first
        self.members[first] += self.members[second]
        self.members[second] = []

    def _lower(self, part: int, to: int, fixed: int) -> bool:
        """Lower a part and what must precede it; return False, nothing changed, if it cannot be.

        It cannot where that would lower ``fixed`` too: a path leads from there to here through
        what stays out.
        """
        level, group_of = self.level, self.group_of
        before: dict[int, int] = {}
        work = [(part, to)]
        steps = 0
        while work:
            moved, bound = work.pop()
            if level[self.members[moved][0]] <= bound:
                continue
            steps += len(self.members[moved])
            if moved == fixed or steps > _REACH:
                for item, old in before.items():
                    level[item] = old
                return False
            for item in self.members[moved]:
                before.setdefault(item, level[item])
                level[item] = bound
            for item in self.members[moved]:
                for source, most in self._bounds_before(item, bound):
                    if level[source] > most and source >= self.reached:
                        work.append((group_of[source], most))
        return True

    def _bounds_before(self, item: int, level: int) -> Iterator[tuple[int, int]]:
        """Yield what must come before ``item``, and the greatest level that leaves it."""
        for source in self.items.before[item]:
            yield source, level - self._step(source, item)
        for source in self.items.apart_from.get(item, ()):
            yield source, level - 1
