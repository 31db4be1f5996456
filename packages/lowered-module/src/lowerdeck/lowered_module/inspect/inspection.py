"""Query the delegates of a lowered program, and the nodes outside of them."""

from __future__ import annotations

from typing import cast

from torch.fx import Graph, GraphModule, Node

from lowerdeck.lowered_module.delegate.module import LoweredBackendModule
from lowerdeck.torch_base import attribute_of, executorch_call_delegate, graphs_of, is_getitem


def get_lowered_submodules(
    graph_module: GraphModule,
) -> list[tuple[str, LoweredBackendModule, Node]]:
    """Return the delegates that one graph calls: name, module and calling node, in order.

    Args:
        graph_module: One graph, without its nested graphs.
    """
    calls = graph_module.graph.find_nodes(op="call_function", target=executorch_call_delegate)
    fetched = [(cast("Node", call.args[0]), call) for call in calls]
    return [
        (str(node.target), cast("LoweredBackendModule", attribute_of(graph_module, node)), call)
        for node, call in fetched
    ]


def get_lowered_backend_modules(graph_module: GraphModule) -> list[LoweredBackendModule]:
    """Return the delegates that one graph calls, in order.

    Args:
        graph_module: One graph, without its nested graphs.
    """
    return [module for _, module, _ in get_lowered_submodules(graph_module)]


def delegates_in(graph_module: GraphModule) -> list[LoweredBackendModule]:
    """Return the delegates of a graph and its nested graphs, in order."""
    return [
        delegate for gm in graphs_of(graph_module) for delegate in get_lowered_backend_modules(gm)
    ]


def get_delegates(graph: Graph) -> list[Node]:
    """Return the ``get_attr`` nodes of the delegates of one graph, in order.

    Args:
        graph: One graph, without its nested graphs.
    """
    calls = graph.find_nodes(op="call_function", target=executorch_call_delegate)
    return list(dict.fromkeys(cast("Node", call.args[0]) for call in calls))


def get_non_lowered_nodes(graph: Graph) -> list[Node]:
    """Return the ``call_function`` nodes of one graph, except delegates and their getitems.

    Args:
        graph: One graph, without its nested graphs.
    """
    return [
        node
        for node in graph.nodes
        if node.op == "call_function"
        and node.target is not executorch_call_delegate
        and not (
            is_getitem(node) and getattr(node.args[0], "target", None) is executorch_call_delegate
        )
    ]


def format_delegated_graph(graph_module: GraphModule) -> str:
    """Return one graph as text, with the backend and the graph of each delegate inserted.

    Args:
        graph_module: One graph; a delegate's own delegates are shown too.
    """
    delegates = {call.args[0]: module for _, module, call in get_lowered_submodules(graph_module)}
    lines = ["graph():"]
    for node in graph_module.graph.nodes:
        text = node.format_node()
        if text:
            lines.append(f"    {text}")
        delegate = delegates.get(node)
        if delegate is not None:
            inner = format_delegated_graph(delegate.original_module.graph_module)
            lines.append(f"        backend_id: {delegate.backend_id}")
            lines += [f"        {line}" for line in inner.splitlines()]
    return "\n".join(lines)


def print_delegated_graph(graph_module: GraphModule) -> None:
    """Print ``format_delegated_graph(graph_module)``."""
    print(format_delegated_graph(graph_module))
