"""The graph as partitioning sees it: nodes that must stay together are one item."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch.fx import Node


@dataclass(slots=True)
class ItemGraph:
    """Nodes gathered into items, and the edges between items, all by number.

    Items are numbered in a topological order. Values are the nodes that some other item reads.

    Attributes:
        nodes: The nodes of each item, in the graph's order.
        wanted: Whether each item may be in a partition.
        before: For each item those that must precede it.
        after: For each item those that must follow it.
        apart: For each item those after it that must not share its partition.
        apart_from: The same, backwards.
        reads: For each item the values that it takes from others.
        makes: For each item its values that others read.
        readers: For each value the items that read it, other than its own.
        maker: For each value its item.
    """

    nodes: list[list[Node]]
    wanted: list[bool]
    before: list[list[int]] = field(default_factory=list)
    after: list[list[int]] = field(default_factory=list)
    apart: dict[int, list[int]] = field(default_factory=dict)
    apart_from: dict[int, list[int]] = field(default_factory=dict)
    reads: list[list[int]] = field(default_factory=list)
    makes: list[list[int]] = field(default_factory=list)
    readers: list[list[int]] = field(default_factory=list)
    maker: list[int] = field(default_factory=list)


def item_graph(
    nodes: Sequence[Node],
    item_of: dict[Node, int],
    count: int,
    wanted: Sequence[bool],
    hazards: Sequence[tuple[Node, Node]],
) -> ItemGraph:
    """Return the items and what flows between them: O(nodes + edges).

    Args:
        nodes: The graph's nodes in a legal order.
        item_of: The item of each node; items are numbered in a topological order.
        count: Number of items.
        wanted: Whether each item may be in a partition.
        hazards: Pairs of nodes that must keep their order.
    """
    found = ItemGraph([[] for _ in range(count)], list(wanted))
    found.before = [[] for _ in range(count)]
    found.after = [[] for _ in range(count)]
    found.reads = [[] for _ in range(count)]
    found.makes = [[] for _ in range(count)]
    value_of: dict[Node, int] = {}
    for node in nodes:
        item = item_of[node]
        found.nodes[item].append(node)
        reads = found.reads[item]
        for source in node.all_input_nodes:
            origin = item_of[source]
            if origin == item:
                continue
            value = value_of.get(source)
            if value is None:
                value = value_of[source] = len(found.maker)
                found.maker.append(origin)
                found.readers.append([])
                found.makes[origin].append(value)
            reads.append(value)
    for item, reads in enumerate(found.reads):
        if len(found.nodes[item]) > 1:
            reads[:] = dict.fromkeys(reads)
        for value in reads:
            found.readers[value].append(item)
            origin = found.maker[value]
            found.before[item].append(origin)
            found.after[origin].append(item)
    for first, second in hazards:
        origin, item = item_of[first], item_of[second]
        if origin != item:
            found.before[item].append(origin)
            found.after[origin].append(item)
    return found


def keep_items_apart(items: ItemGraph, first: int, second: int) -> None:
    """Demand that two items, numbered in this order, are in different partitions."""
    items.apart.setdefault(first, []).append(second)
    items.apart_from.setdefault(second, []).append(first)
