"""Find out whether a partitioner changed the graph that it was only to tag."""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import GraphModule, Node

from lowerdeck.torch_base import attribute_of


def first_edit(before: GraphModule, after: GraphModule) -> str | None:
    """Return in words the first difference between two graphs, or None where there is none.

    Compared are operators, arguments and keyword arguments with every literal in them, the order
    of nodes, and nested graphs likewise; metadata and node names are not.

    Args:
        before: The graph as it was.
        after: The graph as it came back.
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
                found = first_edit(inner, changed)
                if found is not None:
                    return f"in {one.target}: {found}"
            elif type(inner) is not type(changed):
                return f"attribute {one.target} has become a {type(changed).__name__}"
    if len(old) != len(new):
        extra = (old if len(old) > len(new) else new)[min(len(old), len(new))]
        return f"{_call(extra)} was {'removed' if len(old) > len(new) else 'added'}"
    return None


def _same_target(one: Node, other: Node) -> bool:
    # Placeholders are known by their position: fx gives copies other names where it must.
    return one.op in ("placeholder", "output") or one.target == other.target


def _same(one: object, other: object, match: Mapping[Node, Node]) -> bool:
    if isinstance(one, Node):
        return match.get(one) is other
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(
            _same(a, b, match) for a, b in zip(one, other, strict=True)
        )
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(_same(one[key], other[key], match) for key in one)
    if isinstance(one, slice) and isinstance(other, slice):
        ends = ((one.start, other.start), (one.stop, other.stop), (one.step, other.step))
        return all(_same(a, b, match) for a, b in ends)
    return one is other or (type(one) is type(other) and bool(one == other))


def _call(node: Node) -> str:
    return node.format_node() or f"{node.op} {node.name}"
