"""Walks over a program's graph and all graphs nested in it."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import cast

from torch.fx import GraphModule, Node

from lowerdeck.lowered_module._torch_private import executorch_call_delegate


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


def is_getitem(node: Node) -> bool:
    """Return whether ``node`` picks one value of a node that has several."""
    return node.op == "call_function" and node.target is operator.getitem


def delegate_of(graph_module: GraphModule, call: Node) -> object:
    """Return the delegate that a call of ``graph_module`` calls."""
    return attribute_of(graph_module, cast("Node", call.args[0]))


def delegate_calls(graph_module: GraphModule) -> list[Node]:
    """Return the nodes of one graph that call delegates, in order."""
    return graph_module.graph.find_nodes(op="call_function", target=executorch_call_delegate)


def computing_nodes(graph_module: GraphModule) -> Iterator[Node]:
    """Yield the nodes that compute in the program itself, nested graphs included.

    Calls of delegates and getitems are not among them.
    """
    for gm in graphs_of(graph_module):
        for node in gm.graph.nodes:
            computes = node.op == "call_function" and not is_getitem(node)
            if computes and node.target is not executorch_call_delegate:
                yield node
