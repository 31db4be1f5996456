"""Move items between the levels that suit them to where the fewest values cross."""

from __future__ import annotations

from collections.abc import Iterable

from lowerdeck.graph_fuser.items import ItemGraph
from lowerdeck.graph_fuser.levels import (
    border_values,
    ceiling,
    earliest_levels,
    floor,
    latest_levels,
)

_PASSES = 3
_CANDIDATES = 6


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
                    level[item] = floor(items, level, item)
                else:
                    level[item] = ceiling(items, level, item, self.top)
                continue
            low = self._low(item) if not forwards else floor(items, level, item)
            high = self._high(item) if forwards else ceiling(items, level, item, self.top)
            if low < high and self._settle(item, low, high):
                moved += 1
        return moved

    def _low(self, item: int) -> int:
        """Return the least level while the items before have not been swept."""
        return floor(self.items, self.level, item)

    def _high(self, item: int) -> int:
        return ceiling(self.items, self.level, item, self.top)

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
