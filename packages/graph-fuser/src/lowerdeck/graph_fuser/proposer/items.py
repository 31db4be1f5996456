"""The graph as partitioning sees it: nodes that must stay together are one item."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        reads: For each item the values that it takes from others.
        makes: For each item its values that others read.
        readers: For each value the items that read it, other than its own.
        maker: For each value its item.
    """

    nodes: list[list[Node]]
    wanted: list[bool]
    before: list[list[int]] = field(default_factory=list)
    after: list[list[int]] = field(default_factory=list)
    reads: list[list[int]] = field(default_factory=list)
    makes: list[list[int]] = field(default_factory=list)
    readers: list[list[int]] = field(default_factory=list)
    maker: list[int] = field(default_factory=list)


def item_graph(
    nodes: Sequence[Node],
    item_of: Mapping[Node, int],
    count: int,
    wanted: Mapping[Node, bool],
    hazards: Sequence[tuple[Node, Node]],
) -> ItemGraph:
    """Return the items and what flows between them: O(nodes + edges).

    Args:
        nodes: The graph's nodes in a legal order.
        item_of: The item of each node; items are numbered in a topological order.
        wanted: Whether each node may be in a partition.
        hazards: Pairs of nodes that must keep their order.
    """
    graph = ItemGraph([[] for _ in range(count)], [False] * count)
    graph.before = [[] for _ in range(count)]
    graph.after = [[] for _ in range(count)]
    graph.reads = [[] for _ in range(count)]
    graph.makes = [[] for _ in range(count)]
    value_of: dict[Node, int] = {}
    for node in nodes:
        item = item_of[node]
        graph.nodes[item].append(node)
        graph.wanted[item] = wanted[node]
        reads = graph.reads[item]
        for source in node.all_input_nodes:
            origin = item_of[source]
            if origin == item:
                continue
            value = value_of.get(source)
            if value is None:
                value = value_of[source] = len(graph.maker)
                graph.maker.append(origin)
                graph.readers.append([])
                graph.makes[origin].append(value)
            reads.append(value)
    for item, reads in enumerate(graph.reads):
        # Two nodes of one item may read the same value; it crosses the border once.
        if len(graph.nodes[item]) > 1:
            reads[:] = dict.fromkeys(reads)
        for value in reads:
            graph.readers[value].append(item)
            origin = graph.maker[value]
            graph.before[item].append(origin)
            graph.after[origin].append(item)
    for first, second in hazards:
        origin, item = item_of[first], item_of[second]
        if origin != item:
            graph.before[item].append(origin)
            graph.after[origin].append(item)
    return graph
