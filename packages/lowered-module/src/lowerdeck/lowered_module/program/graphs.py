"""What is in a program's graphs: delegates, elements of tuples, what computes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from torch.fx import GraphModule, Node

from lowerdeck.torch_base import attribute_of, executorch_call_delegate, graphs_of, is_getitem


def value_of(output: object) -> object:
    """Return what an output of a graph is, of a node its fake value."""
    return output.meta.get("val") if isinstance(output, Node) else output


def delegate_of(graph_module: GraphModule, call: Node) -> object:
    """Return the delegate that a call of ``graph_module`` calls."""
    return attribute_of(graph_module, cast("Node", call.args[0]))


def delegate_calls(graph_module: GraphModule) -> list[Node]:
    """Return the nodes of one graph that call delegates, in order."""
    return graph_module.graph.find_nodes(op="call_function", target=executorch_call_delegate)


def delegates_in(graph_module: GraphModule) -> list[Any]:
    """Return the delegates that a graph and the graphs nested in it call, in order."""
    return [delegate_of(gm, call) for gm in graphs_of(graph_module) for call in delegate_calls(gm)]


def computing_nodes(graph_module: GraphModule) -> Iterator[Node]:
    """Yield the nodes that compute in the program itself, nested graphs included.

    Calls of delegates and getitems are not among them.
    """
    for gm in graphs_of(graph_module):
        for node in gm.graph.nodes:
            computes = node.op == "call_function" and not is_getitem(node)
            if computes and node.target is not executorch_call_delegate:
                yield node
