"""Inline submodule calls: the inverse of fusion."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from lowerdeck.graph_fuser._torch_private import defer_code
from lowerdeck.graph_fuser.errors import RegionError
from lowerdeck.torch_base import attribute_of


def inline_submodule(gm: GraphModule, call_node: Node) -> dict[Node, Node]:
    """Inline the submodule called by ``call_node``; return a map to the copied nodes.

    Inverse of fusion: fusing and then inlining restores the same nodes, in the same order if the
    fused nodes were contiguous. Attributes keep their names if the parent has the same object
    under the same name; otherwise they are read through the submodule, which stays installed.

    Args:
        gm: The graph module, changed in place; its code is regenerated at its next use.
        call_node: A ``call_module`` node of ``gm`` that calls a graph module.

    Returns:
        From each computing node of the submodule to its copy in ``gm``.

    Raises:
        RegionError: The node is not in this graph, calls no graph module, or has mismatched
            arguments. ``gm`` is unchanged.

    Example:
        >>> import torch
        >>> gm = torch.fx.symbolic_trace(lambda x: (x + 1).relu().sin())
        >>> _, add, relu, _, _ = gm.graph.nodes
        >>> from lowerdeck.graph_fuser import fuse_partitions
        >>> fused = fuse_partitions(gm, {"block": [add, relu]})["block"]
        >>> _ = inline_submodule(gm, fused.call_node)
        >>> [str(node.target) for node in gm.graph.nodes if node.op != "call_function"]
        ['x', 'relu', 'sin', 'output']
    """
    inner, path = _callee(gm, call_node), str(call_node.target)
    env = _arguments(inner, call_node)
    with gm.graph.inserting_before(call_node):
        value: Any = gm.graph.graph_copy(inner.graph, env)
    copies = {
        node: env[node] for node in inner.graph.nodes if node.op not in {"placeholder", "output"}
    }
    for node, copy in copies.items():
        if node.op in {"get_attr", "call_module"}:
            copy.target = _target(gm, inner, path, str(node.target))
    for user in list(call_node.users):
        if isinstance(value, (tuple, list)) and user.target is operator.getitem:
            _replace(user, value[user.args[1]])  # type: ignore[index]
            gm.graph.erase_node(user)
    _replace(call_node, value)
    gm.graph.erase_node(call_node)
    _remove_unused(gm, path)
    defer_code(gm)
    return copies


def _callee(gm: GraphModule, call_node: Node) -> GraphModule:
    if call_node.graph is not gm.graph or (
        call_node not in gm.graph.find_nodes(op=call_node.op, target=call_node.target)
    ):
        raise RegionError(f"Node {call_node.name!r} is not in the graph of the module passed.")
    inner = attribute_of(gm, call_node) if call_node.op == "call_module" else None
    if not isinstance(inner, GraphModule):
        raise RegionError(
            f"Node {call_node.name!r} calls a {type(inner).__name__}; expected a call_module node "
            "of a GraphModule."
        )
    return inner


def _arguments(inner: GraphModule, call_node: Node) -> dict[Node, Any]:
    """Return the argument of each placeholder."""
    placeholders = {str(node.target): node for node in inner.graph.find_nodes(op="placeholder")}
    passed = {**dict(zip(placeholders, call_node.args, strict=False)), **call_node.kwargs}
    count = len(call_node.args) + len(call_node.kwargs)
    defaults = {name: node.args[0] for name, node in placeholders.items() if node.args}
    if len(passed) != count or passed.keys() | defaults.keys() != placeholders.keys():
        raise RegionError(
            f"Node {call_node.name!r} passes {count} arguments ({', '.join(passed)}); submodule "
            f"{call_node.target!r} takes {', '.join(placeholders)}."
        )
    return {node: passed.get(name, defaults.get(name)) for name, node in placeholders.items()}


def _target(gm: GraphModule, inner: GraphModule, path: str, name: str) -> str:
    """Return the attribute path, from the parent, of a submodule's attribute."""
    # Prefer the parent's own attribute: a path through the submodule would keep the uncalled
    # submodule installed.
    if attribute_of(gm, name) is attribute_of(inner, name):
        return name
    return f"{path}.{name}"


def _replace(node: Node, value: Any) -> None:
    """Replace all uses of ``node`` by ``value``, which may contain constants."""
    if isinstance(value, Node):
        node.replace_all_uses_with(value)
        return
    for user in list(node.users):
        user.args = map_arg(user.args, lambda item: value if item is node else item)
        user.kwargs = map_arg(user.kwargs, lambda item: value if item is node else item)


def _remove_unused(gm: GraphModule, path: str) -> None:
    """Delete the submodule unless the graph still uses it or its attributes."""
    used = (
        f"{node.target}.".startswith(f"{path}.")
        for op in ("get_attr", "call_module")
        for node in gm.graph.find_nodes(op=op)
    )
    if not any(used):
        holder, _, name = path.rpartition(".")
        owner = attribute_of(gm, holder) if holder else gm
        if isinstance(owner, torch.nn.Module):
            delattr(owner, name)
