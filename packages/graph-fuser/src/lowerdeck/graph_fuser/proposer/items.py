"""Item graph for partitioning: nodes that must share a partition form one item."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch.fx import Node


@dataclass(slots=True)
class ItemGraph:
    """Items and the edges between them, by index.

    Items are in topological order. Values are nodes read by another item.

    Attributes:
        nodes: Nodes of each item, in graph order.
        wanted: Whether each item may be in a partition.
        before: Predecessors of each item.
        after: Successors of each item.
        reads: Values of other items read by each item.
        makes: Values of each item read by others.
        readers: Items that read each value, except its producer.
        maker: Item that produces each value.
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
    """Return the items and the edges between them, in O(nodes + edges).

    Args:
        nodes: The graph's nodes in topological order.
        item_of: Item of each node; items are numbered in topological order.
        wanted: Whether each node may be in a partition.
        hazards: Node pairs whose order must be preserved.
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
        # A value read by two nodes of one item counts once.
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
