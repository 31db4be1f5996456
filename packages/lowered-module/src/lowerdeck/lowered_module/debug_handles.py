"""Numbers that tie what runs on a device back to the nodes of the program."""

from __future__ import annotations

import operator
from collections.abc import Iterator

from torch.fx import Graph, GraphModule, Node

HANDLE = "debug_handle"


def graphs_of(graph_module: GraphModule) -> Iterator[GraphModule]:
    """Yield ``graph_module`` and every graph nested in it that a node refers to, each once.

    Graphs inside earlier delegates are not among them: a delegate is closed.
    """
    seen: set[int] = set()
    waiting = [graph_module]
    while waiting:
        current = waiting.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        waiting.extend(
            reversed([child for _, child in nested_graphs(current) if id(child) not in seen])
        )


def nested_graphs(graph_module: GraphModule) -> Iterator[tuple[Node, GraphModule]]:
    """Yield each get_attr node of one graph that refers to a graph, with that graph."""
    for node in graph_module.graph.find_nodes(op="get_attr"):
        attribute = attribute_of(graph_module, node)
        if isinstance(attribute, GraphModule):
            yield node, attribute


def attribute_of(graph_module: GraphModule, node: Node) -> object:
    """Return what a get_attr node of ``graph_module`` refers to, or None where nothing is."""
    value: object = graph_module
    for atom in str(node.target).split("."):
        value = getattr(value, atom, None)
    return value


def assign_debug_handles(graph_module: GraphModule) -> int:
    """Give each computing node without a debug handle a new one; return the next free handle.

    Modifies node metadata in place. Handles that are there already are kept, so that a program
    whose handles were assigned by another tool still maps to that tool's records. New handles
    are unique across the program with all its nested graphs.

    Args:
        graph_module: The outermost graph.

    Returns:
        The smallest handle above all in use.
    """
    all_graphs = list(graphs_of(graph_module))
    following = 1 + max(
        (handle for gm in all_graphs for handle in _handles(gm.graph)),
        default=0,
    )
    for gm in all_graphs:
        for node in gm.graph.nodes:
            if node.op == "call_function" and not isinstance(node.meta.get(HANDLE), int):
                node.meta[HANDLE] = following
                following += 1
    return following


def _handles(graph: Graph) -> Iterator[int]:
    for node in graph.nodes:
        handle = node.meta.get(HANDLE)
        if isinstance(handle, int):
            yield handle


def is_getitem(node: Node) -> bool:
    """Return whether ``node`` picks one value of a node that has several."""
    return node.op == "call_function" and node.target is operator.getitem
