"""Merge nodes that only move bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lowerdeck.xnnpack.emit.emission import Emission
from lowerdeck.xnnpack.payload.schema import NONE, Graph, Node, NodeKind

_MOVES = (NodeKind.COPY, NodeKind.STATIC_RESHAPE, NodeKind.STATIC_TRANSPOSE)


def merge_moves(emission: Emission) -> None:
    """Merge consecutive and equal reshapes, transposes and copies, in place.

    The runtime's graph optimiser merges what is left of them, and in executorch 1.4.1 it may write
    to memory that it has freed when it does: loading such a payload can end the process. A merged
    node reads what the first one read; nodes without readers are left to the caller to drop.

    Args:
        emission: A payload whose inputs and outputs are all there.
    """
    graph, sources = emission.graph, emission.sources
    makers: dict[int, int] = {}
    known: dict[Any, int] = {}
    renamed: dict[int, int] = {}
    for number, node in enumerate(graph.nodes):
        fields = {
            name: renamed.get(value, value) if name.endswith("_id") else value  # type: ignore[arg-type]
            for name, value in node.fields.items()
        }
        merged = replace(node, fields=fields)
        output = _id(node, "output_id")
        if node.kind in _MOVES:
            maker = makers.get(_id(merged, "input_id"), -1)
            if maker >= 0 and graph.nodes[maker].kind is node.kind:
                merged = _merge(graph.nodes[maker], merged)
                sources[number] = tuple(dict.fromkeys((*sources[maker], *sources[number])))
            merged = _without_effect(graph, merged)
            key = (merged.kind, *sorted({**merged.fields, "output_id": NONE}.items()))
            other = known.setdefault(key, output)
            if other != output:
                merged = _copy(other, output)
            if merged.kind is NodeKind.COPY and not graph.values[output].flags:
                renamed[output] = _id(merged, "input_id")
        graph.nodes[number] = merged
        makers[output] = number


def _merge(first: Node, second: Node) -> Node:
    """Return one move for two of a kind, of which the second reads the first."""
    fields = {**second.fields, "input_id": first.fields["input_id"]}
    if second.kind is NodeKind.STATIC_TRANSPOSE:
        before, after = first.fields["perm"], second.fields["perm"]
        assert isinstance(before, tuple)
        assert isinstance(after, tuple)
        fields["perm"] = tuple(before[axis] for axis in after)
    return replace(second, fields=fields)


def _without_effect(graph: Graph, node: Node) -> Node:
    """Return a copy for a move that leaves its input as it is, any other node as it is."""
    source, output = _id(node, "input_id"), _id(node, "output_id")
    if node.kind is NodeKind.COPY:
        return node
    if node.kind is NodeKind.STATIC_TRANSPOSE:
        perm = node.fields["perm"]
        assert isinstance(perm, tuple)
        moves = perm != tuple(range(len(perm)))
    else:
        dims = graph.values[source].dims
        # Two sizes that vary may have come from other places.
        moves = dims != node.fields.get("new_shape") or dims.count(0) > 1
    return node if moves else _copy(source, output)


def _copy(source: int, output: int) -> Node:
    return Node(NodeKind.COPY, {"input_id": source, "output_id": output})


def _id(node: Node, name: str) -> int:
    value = node.fields[name]
    assert isinstance(value, int)
    return value
