"""Partition by levels: the fewest partitions that cannot depend on each other in a circle.

Call an item *wanted* if it may stand in a partition. Give every item a level: a wanted item's
level is at least that of each wanted item before it; an unwanted item's is at least one more than
that of each wanted item before it; and both are at least that of each unwanted item before them.
Take the least such levels, and let the wanted items of one level be one partition.

*Acyclic.* Levels never fall along an edge. A path that leaves a partition of level k through an
unwanted item goes on at k + 1 or above; one that leaves it straight into another partition does
too, as the wanted items of level k are all in it. So no path comes back.

*Fewest.* An item of level k ends a path on which a wanted item is followed by an unwanted one and
later by a wanted one k times. The k + 1 wanted items so separated need k + 1 different partitions:
were two in one, the path between them would leave it and come back. Level k therefore needs k + 1
partitions, and has them.

Many items may stand on several levels without breaking either argument. ``spread`` moves each to
where the fewest values cross the partitions' borders, in a few passes to and fro.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lowerdeck.graph_fuser.items import ItemGraph

_PASSES = 3
_CANDIDATES = 6


def earliest_levels(items: ItemGraph) -> list[int]:
    """Return the least levels: O(items + edges)."""
    level = [0] * len(items.nodes)
    for item in range(len(level)):
        level[item] = _floor(items, level, item)
    return level


def latest_levels(items: ItemGraph, earliest: Sequence[int]) -> list[int]:
    """Return the greatest levels that need no more partitions than the least ones."""
    top = max(
        (level for level, is_in in zip(earliest, items.wanted, strict=True) if is_in), default=0
    )
    level = [0] * len(earliest)
    for item in range(len(level) - 1, -1, -1):
        level[item] = _ceiling(items, level, item, top)
    return level


def _floor(items: ItemGraph, level: Sequence[int], item: int) -> int:
    """Return the least level that what stands before ``item`` leaves it."""
    is_in = items.wanted
    least = 0
    if is_in[item]:
        for source in items.before[item]:
            if level[source] > least:
                least = level[source]
        for source in items.apart_from.get(item, ()):
            least = max(least, level[source] + 1)
        return least
    for source in items.before[item]:
        bound = level[source] + 1 if is_in[source] else level[source]
        if bound > least:
            least = bound
    return least


def _ceiling(items: ItemGraph, level: Sequence[int], item: int, top: int) -> int:
    """Return the greatest level that what stands behind ``item`` leaves it."""
    is_in = items.wanted
    if not is_in[item]:
        # Nothing wanted may follow: then any level will do, one above the last partition included.
        return min((level[target] for target in items.after[item]), default=top + 1)
    most = top
    for target in items.after[item]:
        bound = level[target] if is_in[target] else level[target] - 1
        if bound < most:
            most = bound
    for target in items.apart.get(item, ()):
        most = min(most, level[target] - 1)
    return most


def border_values(items: ItemGraph, level: Sequence[int]) -> int:
    """Return how many values enter partitions and leave them, over all partitions."""
    total = 0
    for value, origin in enumerate(items.maker):
        homes = {level[reader] if items.wanted[reader] else -1 for reader in items.readers[value]}
        if items.wanted[origin]:
            homes.discard(level[origin])
            total += bool(homes)
        homes.discard(-1)
        total += len(homes)
    return total


def spread(items: ItemGraph) -> list[int]:
    """Return levels, as few as possible, with few values across the borders: O(items + edges)."""
    earliest = earliest_levels(items)
    if not any(earliest):
        return earliest
    best: list[int] = earliest
    fewest: int | None = None
    for start in (latest_levels(items, earliest), earliest):
        level = _improve(items, list(start))
        cost = border_values(items, level)
        if fewest is None or cost < fewest:
            best, fewest = level, cost
    return best


def _improve(items: ItemGraph, level: list[int]) -> list[int]:
    top = max((level[item] for item, is_in in enumerate(items.wanted) if is_in), default=0)
    mover = _Mover(items, level, top)
    forward, backward = range(len(level)), range(len(level) - 1, -1, -1)
    for _ in range(_PASSES):
        moved = mover.sweep(backward, forwards=False)
        moved += mover.sweep(forward, forwards=True)
        if not moved:
            break
    return level


class _Mover:
    """Moves items between levels, one at a time, while fewer values cross."""

    def __init__(self, items: ItemGraph, level: list[int], top: int) -> None:
        self.items = items
        self.level = level
        self.top = top
        # How many readers each value has at each level; unwanted readers count at -1.
        self.seen: list[dict[int, int]] = [{} for _ in items.maker]
        for value, readers in enumerate(items.readers):
            counts = self.seen[value]
            for reader in readers:
                place = level[reader] if items.wanted[reader] else -1
                counts[place] = counts.get(place, 0) + 1

    def sweep(self, order: Iterable[int], *, forwards: bool) -> int:
        """Offer every item a better level, in one direction; return how many took it."""
        items, level = self.items, self.level
        moved = 0
        # An unwanted item follows what has been swept already: that frees the most room ahead.
        for item in order:
            if not items.wanted[item]:
                if forwards:
                    level[item] = _floor(items, level, item)
                else:
                    level[item] = _ceiling(items, level, item, self.top)
                continue
            low = self._low(item) if not forwards else _floor(items, level, item)
            high = self._high(item) if forwards else _ceiling(items, level, item, self.top)
            if low < high and self._settle(item, low, high):
                moved += 1
        return moved

    def _low(self, item: int) -> int:
        """Return the least level while the items before have not been swept."""
        return _floor(self.items, self.level, item)

    def _high(self, item: int) -> int:
        return _ceiling(self.items, self.level, item, self.top)

    def _settle(self, item: int, low: int, high: int) -> bool:
        here = self.level[item]
        best, least = here, self._cost(item, here)
        for place in self._candidates(item, low, high):
            if place != here:
                cost = self._cost(item, place)
                if cost < least:
                    best, least = place, cost
        if best == here:
            return False
        for value in self.items.reads[item]:
            counts = self.seen[value]
            counts[here] -= 1
            if not counts[here]:
                del counts[here]
            counts[best] = counts.get(best, 0) + 1
        self.level[item] = best
        return True

    def _candidates(self, item: int, low: int, high: int) -> list[int]:
        places = {low: None, high: None}
        for value in self.items.reads[item]:
            origin = self.items.maker[value]
            if self.items.wanted[origin]:
                places[self.level[origin]] = None
            for place, _ in zip(self.seen[value], range(_CANDIDATES), strict=False):
                places[place] = None
        for value in self.items.makes[item]:
            for place, _ in zip(self.seen[value], range(_CANDIDATES), strict=False):
                places[place] = None
        return [place for place in places if low <= place <= high]

    def _cost(self, item: int, place: int) -> int:
        """Return how many border values depend on the level of ``item``, were it ``place``."""
        items, level, seen = self.items, self.level, self.seen
        here = level[item]
        cost = 0
        for value in items.reads[item]:
            origin = items.maker[value]
            inside = items.wanted[origin]
            if inside and level[origin] == place:
                continue
            counts = seen[value]
            others = counts.get(place, 0) - (1 if place == here else 0)
            if not others:
                cost += 1
            if inside:
                # It leaves its own partition anyway if some other reader stands elsewhere.
                home = level[origin]
                elsewhere = len(counts) - (1 if home in counts else 0)
                if here != home and counts.get(here) == 1:
                    elsewhere -= 1
                if not elsewhere:
                    cost += 1
        for value in items.makes[item]:
            counts = seen[value]
            foreign = len(counts) - (1 if place in counts else 0)
            cost += foreign - (1 if -1 in counts else 0) + (1 if foreign else 0)
        return cost
