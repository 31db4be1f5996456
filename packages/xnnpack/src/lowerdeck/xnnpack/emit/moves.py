"""Merge nodes that only move bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lowerdeck.serializer import XnnEncoding, XnnGraph, XnnNode, XnnOperator
from lowerdeck.xnnpack.emit.emission import Emission

_MOVES = (XnnOperator.STATIC_RESHAPE, XnnOperator.STATIC_SLICE, XnnOperator.STATIC_TRANSPOSE)


def merge_moves(emission: Emission) -> None:
    """Merge consecutive reshapes, transposes or slices, and equal ones, in place.

    Otherwise the runtime's graph optimiser merges them, which in executorch 1.4.1 may write to
    freed memory and crash the process at load. The caller removes dead nodes.

    Args:
        emission: A payload with all inputs and outputs.
    """
    graph, sources = emission.graph, emission.sources
    encodings = {value.id: value.encoding for value in graph.values}
    makers: dict[int, int] = {}
    first_uses: dict[Any, int] = {}
    renamed: dict[int, int] = {}
    for number, node in enumerate(graph.nodes):
        merged = node.reading(renamed) if renamed else node
        output = node.number("output_id")
        if node.operator in _MOVES:
            maker = makers.get(merged.number("input_id"), -1)
            if maker >= 0 and _can_merge(graph.nodes[maker], merged, encodings):
                merged = _merge(graph.nodes[maker], merged)
                sources[number] = tuple(dict.fromkeys((*sources[maker], *sources[number])))
            if encodings[merged.number("input_id")] == encodings[output]:
                merged = _without_effect(graph, merged)
            fields = {**merged.fields, "output_id": XnnNode.NONE}
            key = (merged.operator, encodings[output], *sorted(fields.items()))
            other = first_uses.setdefault(key, output)
            if other != output:
                merged = _copy(other, output)
            if merged.operator is XnnOperator.COPY and not graph.values[output].flags:
                renamed[output] = merged.number("input_id")
        graph.nodes[number] = merged
        makers[output] = number


def _can_merge(first: XnnNode, second: XnnNode, encodings: Mapping[int, XnnEncoding]) -> bool:
    """Return whether two moves have the same kind and keep the encoding."""
    if first.operator is not second.operator:
        return False
    ids = (first.number("input_id"), second.number("input_id"), second.number("output_id"))
    return len({encodings[value_id] for value_id in ids}) == 1


def _merge(first: XnnNode, second: XnnNode) -> XnnNode:
    """Return the move that is equivalent to two consecutive moves of the same kind."""
    fields = {**second.fields, "input_id": first.fields["input_id"]}
    if second.operator is XnnOperator.STATIC_TRANSPOSE:
        before = first.numbers("perm")
        fields["perm"] = tuple(before[axis] for axis in second.numbers("perm"))
    elif second.operator is XnnOperator.STATIC_SLICE:
        offsets = zip(first.numbers("offsets"), second.numbers("offsets"), strict=True)
        sizes = zip(first.numbers("sizes"), second.numbers("sizes"), strict=True)
        fields["offsets"] = tuple(before + after for before, after in offsets)
        # Size 0 means the whole dimension.
        fields["sizes"] = tuple(after or before for before, after in sizes)
    return replace(second, fields=fields)


def _without_effect(graph: XnnGraph, node: XnnNode) -> XnnNode:
    """Return a copy node for a no-op move, and other nodes unchanged."""
    source, output = node.number("input_id"), node.number("output_id")
    if node.operator is XnnOperator.STATIC_TRANSPOSE:
        perm = node.numbers("perm")
        has_effect = perm != tuple(range(len(perm)))
    elif node.operator is XnnOperator.STATIC_RESHAPE:
        dims = graph.values[source].shape
        # A reshape also sets the sizes of a result that may be empty.
        has_effect = dims != node.numbers("new_shape") or 0 in dims
    else:
        return node
    return node if has_effect else _copy(source, output)


def _copy(source: int, output: int) -> XnnNode:
    return XnnNode(XnnOperator.COPY, {"input_id": source, "output_id": output})
