"""Partition by levels: the fewest partitions without a dependency cycle.

Call an item *wanted* if it may be in a partition. Give every item a level: a wanted item's
level is at least that of each wanted item before it; an unwanted item's is at least one more than
that of each wanted item before it; and both are at least that of each unwanted item before them.
Take the least such levels, and let the wanted items of one level be one partition.

*Acyclic.* Levels never decrease along an edge. A path that leaves a partition of level k through
an unwanted item goes on at k + 1 or above; one that leaves it straight into another partition does
too, as the wanted items of level k are all in it. So no path comes back.

*Fewest.* An item of level k ends a path on which a wanted item is followed by an unwanted one and
later by a wanted one k times. These k + 1 wanted items need k + 1 different partitions: if two
were in one partition, the path between them would leave it and return. Level k therefore needs k +
1 partitions, and has them.

Many items may be on several levels without breaking either argument. ``spread`` moves them to
levels with fewer values crossing partition boundaries.
"""

from __future__ import annotations

from collections.abc import Sequence

from lowerdeck.graph_fuser.proposer.items import ItemGraph


def earliest_levels(items: ItemGraph) -> list[int]:
    """Return the least level of each item, in O(items + edges)."""
    level = [0] * len(items.nodes)
    for item in range(len(level)):
        level[item] = floor(items, level, item)
    return level


def latest_levels(items: ItemGraph, earliest: Sequence[int]) -> list[int]:
    """Return the greatest levels that need no more partitions than ``earliest``."""
    top = max(
        (level for level, is_in in zip(earliest, items.wanted, strict=True) if is_in), default=0
    )
    level = [0] * len(earliest)
    for item in range(len(level) - 1, -1, -1):
        level[item] = ceiling(items, level, item, top)
    return level


def floor(items: ItemGraph, level: Sequence[int], item: int) -> int:
    """Return the least level of ``item`` given its predecessors.

    Args:
        level: Level of each item; only those of the predecessors are read.
    """
    is_in = items.wanted
    least = 0
    if is_in[item]:
        for source in items.before[item]:
            if level[source] > least:
                least = level[source]
        return least
    for source in items.before[item]:
        bound = level[source] + 1 if is_in[source] else level[source]
        if bound > least:
            least = bound
    return least


def ceiling(items: ItemGraph, level: Sequence[int], item: int, top: int) -> int:
    """Return the greatest level of ``item`` given its successors.

    Args:
        level: Level of each item; only those of the successors are read.
        top: Level of the last partition.
    """
    is_in = items.wanted
    if not is_in[item]:
        # Without wanted successors any level is valid, even one above the last partition.
        return min((level[target] for target in items.after[item]), default=top + 1)
    most = top
    for target in items.after[item]:
        bound = level[target] if is_in[target] else level[target] - 1
        if bound < most:
            most = bound
    return most


def border_values(items: ItemGraph, level: Sequence[int]) -> int:
    """Return the total number of inputs and outputs of all partitions."""
    total = 0
    for value, origin in enumerate(items.maker):
        levels = {level[reader] if items.wanted[reader] else -1 for reader in items.readers[value]}
        if items.wanted[origin]:
            levels.discard(level[origin])
            total += bool(levels)
        levels.discard(-1)
        total += len(levels)
    return total
