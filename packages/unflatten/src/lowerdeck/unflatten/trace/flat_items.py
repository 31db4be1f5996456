"""A program's nodes as one flat sequence, with the pieces that run in another mode written out."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from torch.fx import GraphModule, Node

from lowerdeck.unflatten._torch_private import (
    AUTOCAST_REGION,
    GRAD_MODE_REGION,
    TRACEPOINT,
)
from lowerdeck.unflatten.trace.dtype_check import CHECK, is_needless

MODE_REGIONS = {AUTOCAST_REGION: 4, GRAD_MODE_REGION: 1}
"""From operator to the number of its arguments that describe the mode."""


class Role(Enum):
    """What an item does.

    Values pass into and out of a region at its borders; at ``PASS_IN`` and ``PASS_OUT`` the mode
    stays as it is.
    """

    COMPUTE = "compute"
    ENTER = "enter"
    PAUSE = "pause"
    RESUME = "resume"
    EXIT = "exit"
    PASS_IN = "pass in"
    PASS_OUT = "pass out"


@dataclass(slots=True, eq=False)
class Scope:
    """One graph of the program, outermost or held by an operator.

    Attributes:
        module: The graph module.
        values: What carries the value of each node in the new graph.
        items: The item of each node.
        computes: Whether anything is computed in it, or in a region inside of it.
    """

    module: GraphModule
    values: dict[Node, Any] = field(default_factory=dict)
    items: dict[Node, Item] = field(default_factory=dict)
    computes: bool = False


@dataclass(slots=True, eq=False)
class Item:
    """One step of the program.

    Attributes:
        node: The node; for the borders of a mode region the operator that held it.
        scope: The graph that holds the node.
        role: What it does.
        inner: For borders, the graph between them.
    """

    node: Node
    scope: Scope
    role: Role = Role.COMPUTE
    inner: Scope | None = None


def mode_arguments(node: Node) -> tuple[tuple[Any, ...], GraphModule | None, tuple[Any, ...]]:
    """Return the mode, the name of the body and the operands of a mode region's operator."""
    count = MODE_REGIONS[node.target]
    body = node.args[count]
    return node.args[:count], body, node.args[count + 1 :]  # type: ignore[return-value]


def flat_items(module: GraphModule) -> Iterator[Item]:
    """Yield the nodes of ``module`` that compute something, in order, mode regions written out."""
    # A stack of iterators, for regions nest.
    scope = Scope(module)
    autocasts: bool | None = None
    stack: list[tuple[Scope, Iterator[Node], Item | None]] = [
        (scope, iter(module.graph.nodes), None)
    ]
    while stack:
        scope, nodes, border = stack[-1]
        for node in nodes:
            if node.op in {"placeholder", "output"}:
                continue
            inner = _body(node, scope)
            if inner is not None:
                enter = Item(node, scope, Role.ENTER, inner)
                yield enter
                stack.append((inner, iter(inner.module.graph.nodes), enter))
                break
            if unpacks(node) or _only_names_a_body(node):
                continue
            if node.target is CHECK:
                if autocasts is None:
                    autocasts = _autocasts(module)
                if is_needless(node, _around(stack), autocasts=autocasts):
                    continue
            item = Item(node, scope)
            scope.items[node] = item
            for around, _, _ in stack:
                around.computes = True
            yield item
        else:
            stack.pop()
            if border is not None:
                yield Item(border.node, border.scope, Role.EXIT, border.inner)


def _autocasts(module: GraphModule) -> bool:
    graphs = (part.graph for part in module.modules() if isinstance(part, GraphModule))
    return any(
        graph.find_nodes(op="call_function", target=AUTOCAST_REGION, sort=False)
        for graph in graphs
    )


def _around(stack: Sequence[tuple[Scope, Iterator[Node], Item | None]]) -> list[Node]:
    return [border.node for _, _, border in stack if border is not None]


def _is_region(node: Any) -> bool:
    if not isinstance(node, Node) or node.op != "call_function":
        return False
    # By identity: hashing an operator is a call into Python.
    return node.target is AUTOCAST_REGION or node.target is GRAD_MODE_REGION


def _body(node: Node, scope: Scope) -> Scope | None:
    if not _is_region(node):
        return None
    _, body, _ = mode_arguments(node)
    held = body
    if isinstance(body, Node) and body.op == "get_attr":
        held = scope.module.get_submodule(str(body.target))
    return Scope(held) if isinstance(held, GraphModule) else None


def unpacks(node: Node) -> bool:
    """Return whether a node takes one value out of a mode region's operator, or of a mark."""
    if node.target is not operator.getitem:
        return False
    source = node.args[0]
    return _is_region(source) or (isinstance(source, Node) and source.target is TRACEPOINT)


def _only_names_a_body(node: Node) -> bool:
    return (
        node.op == "get_attr" and bool(node.users) and all(_is_region(user) for user in node.users)
    )
