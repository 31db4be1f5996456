"""Where each call of a body is among the nodes, before anything is sorted.

A call is anchored at the position of its region's first node, or after its last input where its
readers allow that. Every call gets a key of its own: sorting a stretch goes from key to item and
back, so that two calls of one key would be taken for each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lowerdeck.graph_fuser.outliner.boundary import Item
from lowerdeck.graph_fuser.regions import RegionTree

_Anchor = tuple[int, int]
"""The position of a node, and 0 for that itself or the rank of a call that follows the node."""


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
    anchor_of = _after_inputs(tree, before, after)
    lead = _hoisted(anchor_of, after)
    keys: dict[int, int] = {}
    slot, offset = -1, 0
    distance = stride(tree)
    for child in sorted(anchor_of, key=lambda child: (anchor_of[child], lead.get(child, 0))):
        position, rank = anchor_of[child]
        if position != slot:
            # At the position of its own first node the body has no node; at an input's it has one.
            slot, offset = position, min(rank, 1)
        keys[child] = slot * distance + offset
        offset += 1
    return keys


def stride(tree: RegionTree) -> int:
    """Return the distance between the keys of neighbouring nodes: every call fits between them."""
    return len(tree.regions) + 1


def _after_inputs(
    tree: RegionTree, before: Mapping[int, Sequence[Item]], after: Mapping[int, Sequence[Item]]
) -> dict[int, _Anchor]:
    """Return the anchor of each call: after its last input if its first reader allows that."""
    ranked = sorted(before, key=tree.first.__getitem__)
    anchor_of: dict[int, _Anchor] = {child: (tree.first[child], 0) for child in ranked}

    def of(item: Item) -> _Anchor:
        return anchor_of[item] if isinstance(item, int) else (tree.position[item], 0)

    for rank, child in enumerate(ranked, start=1):
        last = max(map(of, before[child]), default=(-1, 0))
        if last <= anchor_of[child]:
            continue
        following = (last[0], rank)
        if all(of(item) > following for item in after[child]):
            anchor_of[child] = following
    return anchor_of


def _hoisted(anchor_of: dict[int, _Anchor], after: Mapping[int, Sequence[Item]]) -> dict[int, int]:
    """Bring calls forward to the earliest call that needs them; return their order before it.

    Otherwise readers of that call would wait for the position where its suppliers' nodes were.
    """
    lead: dict[int, int] = {}
    if all(
        anchor_of[child] <= anchor_of[reader]
        for child, readers in after.items()
        for reader in readers
        if isinstance(reader, int)
    ):
        return lead  # Nobody waits, which is all there is to say of most graphs.
    # Readers first: what supplies a hoisted call goes with it, and comes before it.
    for count, child in enumerate(_readers_first(after)):
        earliest = min(
            (anchor_of[reader] for reader in after[child] if isinstance(reader, int)),
            default=anchor_of[child],
        )
        if earliest < anchor_of[child]:
            anchor_of[child] = earliest
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
