"""Moves of bytes that the runtime's graph optimiser merges."""

from __future__ import annotations

from collections import Counter

from lowerdeck.serializer.xnnpack.graph import XnnGraph, XnnNode
from lowerdeck.serializer.xnnpack.operators import XnnOperator

_MOVES = (XnnOperator.STATIC_RESHAPE, XnnOperator.STATIC_SLICE, XnnOperator.STATIC_TRANSPOSE)


def mergeable_move(graph: XnnGraph) -> XnnNode | None:
    """Return a move of bytes that alone reads a move of its kind, or is equal to one before it.

    Args:
        graph: The payload, verified.

    Returns:
        The first such node; None where there is none.
    """
    makers = {output: node for node in graph.nodes for output in node.outputs}
    readers = Counter(value for node in graph.nodes for value in node.inputs)
    seen = set()
    for node in graph.nodes:
        if node.operator not in _MOVES:
            continue
        maker = makers.get(node.inputs[0])
        if maker and maker.operator is node.operator and readers[node.inputs[0]] == 1:
            return node
        key = (node.operator, node.inputs, *sorted(node.parameters.items()))
        if key in seen:
            return node
        seen.add(key)
    return None
