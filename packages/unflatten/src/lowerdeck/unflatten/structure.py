"""What two graphs must have in common for the same source to be right for both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

_BY_VALUE = frozenset({bool, int, str, torch.device})
_BY_SPELLING = frozenset({float, complex})


def graph_structure(graph: Graph) -> tuple[object, ...]:
    """Return a key that is equal for graphs that are written as the same source.

    It is several times cheaper than the source itself. Names of nodes do not count, nor do types
    and example values; the model's own lines do, as they become comments. Keys are to be compared
    while their graphs live, for some objects are known by their identity.

    Args:
        graph: The graph.
    """
    places: dict[Node, int] = {}
    found: list[object] = []
    for place, node in enumerate(graph.nodes):
        places[node] = place
        op = node.op
        if op == "placeholder":
            found.append(op)
            continue
        # By identity: hashing an operator is a call into Python.
        target = id(node.target) if op == "call_function" else node.target
        # Whether a value is wanted, and whether once or more often, changes what is written.
        wanted = min(len(node.users), 2)
        found.append((op, target, wanted, *(_frozen(value, places) for value in node.args)))
        if node.kwargs:
            found.append(_frozen(node.kwargs, places))
        meta = node.meta
        found.append((meta.get("stack_trace"), meta.get("closes"), meta.get("carries")))
    return tuple(found)


def _frozen(value: Any, places: Mapping[Node, int]) -> object:
    """Return a hashable stand-in for an argument: a bare number for a node, else with its type."""
    if isinstance(value, Node):
        return places[value]
    kind = type(value)
    if value is None or kind in _BY_VALUE:
        return (kind, value)
    if kind in _BY_SPELLING:
        # Zeros of both signs are equal, but not the same.
        return (kind, repr(value))
    if isinstance(value, (tuple, list)):
        return (kind, *(_frozen(item, places) for item in value))
    if isinstance(value, dict):
        return (kind, *value, *(_frozen(item, places) for item in value.values()))
    if isinstance(value, slice):
        return (kind, *(_frozen(part, places) for part in (value.start, value.stop, value.step)))
    return (kind, id(value))
