"""Detect whether a partitioner changed the graph beyond its tags."""

from __future__ import annotations

from itertools import zip_longest

from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from lowerdeck.torch_base import attribute_of


def first_edit(before: GraphModule, after: GraphModule) -> str | None:
    """Return a description of the first difference between two graphs, or None.

    Compares operators, arguments with all literals, the order of nodes, and nested graphs; ignores
    metadata and node names.
    """
    forms = (_forms(graph_module) for graph_module in (before, after))
    for (node, form), (other, changed) in zip_longest(*forms, fillvalue=(None, None)):
        if form != changed:
            return f"{_call(node)} has become {_call(other)}"
        if node is None or other is None or node.op != "get_attr":
            continue
        inner, changed_inner = attribute_of(before, node), attribute_of(after, other)
        if isinstance(inner, GraphModule) and isinstance(changed_inner, GraphModule):
            edit = first_edit(inner, changed_inner)
            if edit is not None:
                return f"in {node.target}: {edit}"
    return None


def _forms(graph_module: GraphModule) -> list[tuple[Node | None, object]]:
    """Return the compared parts of each node; arguments that are nodes appear by position."""
    places = {node: f"%{place}" for place, node in enumerate(graph_module.graph.nodes)}
    return [
        (
            node,
            (
                node.op,
                # fx may rename placeholders in copies.
                None if node.op in ("placeholder", "output") else node.target,
                # As text: 1 differs from True, and NaN equals itself.
                repr(map_arg((node.args, node.kwargs), places.__getitem__)),
            ),
        )
        for node in places
    ]


def _call(node: Node | None) -> str:
    return "nothing" if node is None else node.format_node() or f"{node.op} {node.name}"
