"""Detect whether a partitioner changed the graph beyond its tags."""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import GraphModule, Node

from lowerdeck.torch_base import attribute_of


def first_edit(before: GraphModule, after: GraphModule) -> str | None:
    """Return a description of the first difference between two graphs, or None.

    Compares operators, arguments with all literals, the order of nodes, and nested graphs; ignores
    metadata and node names.

    Args:
        before: The original graph.
        after: The graph returned by the partitioner.
    """
    old, new = list(before.graph.nodes), list(after.graph.nodes)
    match: dict[Node, Node] = {}
    for one, other in zip(old, new, strict=False):
        match[one] = other
        if one.op != other.op or not _same_target(one, other):
            return f"{_call(one)} has become {_call(other)}"
        if not _same(one.args, other.args, match) or not _same(one.kwargs, other.kwargs, match):
            return f"{_call(one)} has become {_call(other)}"
        if one.op == "get_attr":
            inner, changed = attribute_of(before, one), attribute_of(after, other)
            if isinstance(inner, GraphModule) and isinstance(changed, GraphModule):
                edit = first_edit(inner, changed)
                if edit is not None:
                    return f"in {one.target}: {edit}"
            elif type(inner) is not type(changed):
                return f"attribute {one.target} has become a {type(changed).__name__}"
    if len(old) != len(new):
        extra = (old if len(old) > len(new) else new)[min(len(old), len(new))]
        return f"{_call(extra)} was {'removed' if len(old) > len(new) else 'added'}"
    return None


def _same_target(before: Node, other: Node) -> bool:
    # Placeholders are compared by position, as fx may rename them in copies.
    return before.op in ("placeholder", "output") or before.target == other.target


def _same(before: object, other: object, match: Mapping[Node, Node]) -> bool:
    # Called for each argument of each node: tuples of types are faster than unions.
    if isinstance(before, Node):
        return match.get(before) is other
    if isinstance(before, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(before) == len(other) and all(
            _same(a, b, match) for a, b in zip(before, other, strict=True)
        )
    if isinstance(before, dict) and isinstance(other, dict):
        return list(before) == list(other) and all(
            _same(before[key], other[key], match) for key in before
        )
    if isinstance(before, slice) and isinstance(other, slice):
        ends = ((before.start, other.start), (before.stop, other.stop), (before.step, other.step))
        return all(_same(a, b, match) for a, b in ends)
    return before is other or (type(before) is type(other) and bool(before == other))


def _call(node: Node) -> str:
    return node.format_node() or f"{node.op} {node.name}"
