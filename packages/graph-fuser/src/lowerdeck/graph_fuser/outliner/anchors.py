"""Where each call of a body stands among the nodes, before anything is sorted.

A call is anchored at the place of its region's first node, or behind its last input where its
readers allow that. Every call gets a key of its own: sorting a stretch goes from key to item and
back, so that two calls of one key would be taken for each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lowerdeck.graph_fuser.outliner.boundary import Item
from lowerdeck.graph_fuser.regions import RegionTree

_Place = tuple[int, int]
"""The position of a node, and 0 for its own place or the rank of a call that follows it."""


def anchored(
    tree: RegionTree, children: Sequence[int], pairs: Mapping[tuple[Item, Item], object]
) -> dict[int, int]:
    """Return a key for each called region: the position of a node times the stride, and an offset.

    No two calls have one key, none has that of a node of the body, and none is below that of the
    graph's first node.

    Args:
        tree: The regions.
        children: The regions that the body calls.
        pairs: The body's precedences of which at least one end is a call.
    """
    before: dict[int, list[Item]] = {child: [] for child in children}
    after: dict[int, list[Item]] = {child: [] for child in children}
    for source, target in pairs:
        if isinstance(target, int):
            before[target].append(source)
        if isinstance(source, int):
            after[source].append(target)
    place = _behind_inputs(tree, before, after)
    lead = _hoisted(place, after)
    keys: dict[int, int] = {}
    slot, offset = -1, 0
    for child in sorted(place, key=lambda child: (place[child], lead.get(child, 0))):
        position, rank = place[child]
        if position != slot:
            # At the place of its own first node no node of the body stands; behind an input, one.
            slot, offset = position, min(rank, 1)
        keys[child] = slot * stride(tree) + offset
        offset += 1
    return keys


def stride(tree: RegionTree) -> int:
    """Return the distance between the keys of neighbouring nodes: every call fits between them."""
    return len(tree.regions) + 1


def _behind_inputs(
    tree: RegionTree, before: Mapping[int, Sequence[Item]], after: Mapping[int, Sequence[Item]]
) -> dict[int, _Place]:
    """Return the place of each call: behind its last input if its first reader allows that."""
    ranked = sorted(before, key=tree.first.__getitem__)
    place: dict[int, _Place] = {child: (tree.first[child], 0) for child in ranked}

    def of(item: Item) -> _Place:
        return place[item] if isinstance(item, int) else (tree.position[item], 0)

    for rank, child in enumerate(ranked, start=1):
        last = max(map(of, before[child]), default=(-1, 0))
        if last <= place[child]:
            continue
        behind = (last[0], rank)
        if all(of(item) > behind for item in after[child]):
            place[child] = behind
    return place


def _hoisted(place: dict[int, _Place], after: Mapping[int, Sequence[Item]]) -> dict[int, int]:
    """Bring calls forward to the earliest call that needs them; return their order before it.

    Otherwise readers of that call would wait for the place where its suppliers' nodes stood.
    """
    lead: dict[int, int] = {}
    # Readers first: what supplies a hoisted call goes with it, and stands before it.
    for count, child in enumerate(_readers_first(after)):
        earliest = min(
            (place[reader] for reader in after[child] if isinstance(reader, int)),
            default=place[child],
        )
        if earliest < place[child]:
            place[child] = earliest
            lead[child] = -1 - count
    return lead


def _readers_first(after: Mapping[int, Sequence[Item]]) -> list[int]:
    """Return the calls so that each comes after those that read it; without those on a circle."""
    readers = {child: [item for item in after[child] if isinstance(item, int)] for child in after}
    suppliers: dict[int, list[int]] = {child: [] for child in after}
    for child, found in readers.items():
        for reader in found:
            suppliers[reader].append(child)
    waits = {child: len(found) for child, found in readers.items()}
    order = [child for child, count in waits.items() if not count]
    for child in order:
        for supplier in suppliers[child]:
            waits[supplier] -= 1
            if not waits[supplier]:
                order.append(supplier)
    return order
