"""Choose among the valid levels of each item to minimize boundary values."""

from __future__ import annotations

from collections.abc import Iterable

from lowerdeck.graph_fuser.proposer.items import ItemGraph
from lowerdeck.graph_fuser.proposer.levels import (
    border_values,
    ceiling,
    earliest_levels,
    floor,
    latest_levels,
)

# Levels tried per value; bounds the quadratic cost of values with many readers.
_CANDIDATES = 6


def spread(items: ItemGraph) -> list[int]:
    """Return the level of each item: fewest levels, few boundary values, in O(items + edges)."""
    earliest = earliest_levels(items)
    if not any(earliest):
        return earliest
    improved = _improve(items, list(earliest))
    cost = border_values(items, improved)
    latest = latest_levels(items, earliest)
    # torch's partitioner produces the latest levels; never return a worse result.
    if border_values(items, latest) > cost:
        return improved
    return _improve(items, latest)


def _improve(items: ItemGraph, level: list[int]) -> list[int]:
    top = max((level[item] for item, is_in in enumerate(items.wanted) if is_in), default=0)
    mover = _Mover(items, level, top)
    # One backward and one forward sweep; further sweeps gain little.
    mover.sweep(range(len(level) - 1, -1, -1), forwards=False)
    mover.sweep(range(len(level)), forwards=True)
    return level


class _Mover:
    """Moves single items between levels, so that fewer values cross partition boundaries."""

    def __init__(self, items: ItemGraph, level: list[int], top: int) -> None:
        self.items = items
        self.level = level
        self.top = top
        # Number of readers of each value per level; unwanted readers count at -1.
        self.seen: list[dict[int, int]] = [{} for _ in items.maker]
        for value, readers in enumerate(items.readers):
            counts = self.seen[value]
            for reader in readers:
                reached = level[reader] if items.wanted[reader] else -1
                counts[reached] = counts.get(reached, 0) + 1

    def sweep(self, order: Iterable[int], *, forwards: bool) -> None:
        """Move each item, in the given order, to a level with fewer boundary values, if any."""
        items, level, top = self.items, self.level, self.top
        for item in order:
            if not items.wanted[item]:
                # Follow the items already swept: this leaves the most freedom to the others.
                level[item] = (
                    floor(items, level, item) if forwards else ceiling(items, level, item, top)
                )
                continue
            low, high = floor(items, level, item), ceiling(items, level, item, top)
            if low < high:
                self._settle(item, low, high)

    def _settle(self, item: int, low: int, high: int) -> None:
        here = self.level[item]
        best, least = here, self._cost(item, here)
        for candidate in self._candidates(item, low, high):
            if candidate != here:
                cost = self._cost(item, candidate)
                if cost < least:
                    best, least = candidate, cost
        if best == here:
            return
        for value in self.items.reads[item]:
            counts = self.seen[value]
            counts[here] -= 1
            if not counts[here]:
                del counts[here]
            counts[best] = counts.get(best, 0) + 1
        self.level[item] = best

    def _candidates(self, item: int, low: int, high: int) -> list[int]:
        # Only a level with a producer or another reader can reduce the cost.
        candidates = {low: None, high: None}
        for value in self.items.reads[item]:
            origin = self.items.maker[value]
            if self.items.wanted[origin]:
                candidates[self.level[origin]] = None
            for candidate, _ in zip(self.seen[value], range(_CANDIDATES), strict=False):
                candidates[candidate] = None
        for value in self.items.makes[item]:
            for candidate, _ in zip(self.seen[value], range(_CANDIDATES), strict=False):
                candidates[candidate] = None
        return [candidate for candidate in candidates if low <= candidate <= high]

    def _cost(self, item: int, candidate: int) -> int:
        """Return the number of boundary values of ``item`` at level ``candidate``."""
        items, level, seen = self.items, self.level, self.seen
        here = level[item]
        cost = 0
        for value in items.reads[item]:
            origin = items.maker[value]
            inside = items.wanted[origin]
            if inside and level[origin] == candidate:
                continue
            counts = seen[value]
            others = counts.get(candidate, 0) - (1 if candidate == here else 0)
            if not others:
                cost += 1
            if inside:
                # The value leaves its partition anyway if another reader is elsewhere.
                origin_level = level[origin]
                elsewhere = len(counts) - (1 if origin_level in counts else 0)
                if here != origin_level and counts.get(here) == 1:
                    elsewhere -= 1
                if not elsewhere:
                    cost += 1
        # A value costs one output, plus one input per other level that reads it.
        for value in items.makes[item]:
            counts = seen[value]
            foreign = len(counts) - (1 if candidate in counts else 0)
            cost += foreign - (1 if -1 in counts else 0) + (1 if foreign else 0)
        return cost
