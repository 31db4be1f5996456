"""The steps of a program, with the regions that run under another mode flattened.

Export wraps nodes that run without gradients or under autocast in an operator with a subgraph.
The modules called in there belong to the hierarchy, so the subgraph is written as steps between
an enter and an exit step.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch.fx import GraphModule, Node

from lowerdeck.unflatten._torch_private import AUTOCAST_REGION, GRAD_MODE_REGION, TRACEPOINT

MODE_REGIONS = {AUTOCAST_REGION: 4, GRAD_MODE_REGION: 1}
"""From operator to the number of its arguments that describe the mode."""

_DTYPE_CHECK = torch.ops.aten._assert_tensor_metadata.default


class Role(Enum):
    """Kind of a step; values cross a region's border also where the mode stays unchanged."""

    COMPUTE = "compute"
    ENTER = "enter"
    PAUSE = "pause"
    RESUME = "resume"
    EXIT = "exit"
    PASS_IN = "pass in"
    PASS_OUT = "pass out"


@dataclass(slots=True, eq=False)
class Scope:
    """One graph of the program, the outermost one or that of a region.

    Attributes:
        module: The graph module.
        items: The item of each node.
        computes: Whether it, or a region inside, has a step that computes.
    """

    module: GraphModule
    items: dict[Node, Item] = field(default_factory=dict)
    computes: bool = False


@dataclass(slots=True, eq=False)
class Item:
    """One step of the program.

    Attributes:
        node: The node; for the borders of a region, the region's operator.
        scope: The graph of the node.
        role: The kind of step.
        inner: For borders, the region's graph.
    """

    node: Node
    scope: Scope
    role: Role = Role.COMPUTE
    inner: Scope | None = None


def region_arguments(node: Node) -> tuple[tuple[Any, ...], Any, tuple[Any, ...]]:
    """Return the mode, the body and the operands of a region's operator."""
    count = MODE_REGIONS[node.target]
    return node.args[:count], node.args[count], node.args[count + 1 :]


def flatten_regions(module: GraphModule) -> Iterator[Item]:
    """Yield the steps of ``module`` in order, including those of mode regions.

    Export's assertions of dtypes before conversions are left out: eager has none, and they would
    forbid autocast and ``module.to(dtype)``.
    """
    outermost = Scope(module)
    # A stack of iterators, because regions nest.
    stack: list[tuple[Scope, Iterator[Node], Item | None]] = [
        (outermost, iter(module.graph.nodes), None)
    ]
    while stack:
        scope, nodes, border = stack[-1]
        for node in nodes:
            if node.op in {"placeholder", "output"} or node.target is _DTYPE_CHECK:
                continue
            inner = _body(node, scope)
            if inner is not None:
                enter = Item(node, scope, Role.ENTER, inner)
                yield enter
                stack.append((inner, iter(inner.module.graph.nodes), enter))
                break
            if unpacks_region(node) or _only_names_a_body(node):
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


def _is_region(node: Any) -> bool:
    if not isinstance(node, Node) or node.op != "call_function":
        return False
    # By identity: hashing an operator is a call into Python.
    return node.target is AUTOCAST_REGION or node.target is GRAD_MODE_REGION


def _body(node: Node, scope: Scope) -> Scope | None:
    if not _is_region(node):
        return None
    body = region_arguments(node)[1]
    if isinstance(body, Node) and body.op == "get_attr":
        body = scope.module.get_submodule(str(body.target))
    return Scope(body) if isinstance(body, GraphModule) else None


def unpacks_region(node: Node) -> bool:
    """Return whether a node takes one value out of a region's operator, or of a tracepoint."""
    if node.target is not operator.getitem:
        return False
    source = node.args[0]
    return _is_region(source) or (isinstance(source, Node) and source.target is TRACEPOINT)


def _only_names_a_body(node: Node) -> bool:
    return node.op == "get_attr" and bool(node.users) and all(map(_is_region, node.users))
