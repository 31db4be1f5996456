"""Replace a call by the graph that it calls: the inverse of fusing."""

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
    """Put the nodes of a called submodule in place of ``call_node``; return where each went.

    The inverse of fusing: fuse, then inline, and the graph computes the same with the same nodes,
    in the same order where the fused nodes were together. Attributes keep their names where the
    parent has the same object under the same name; otherwise they are read through the submodule,
    which then stays installed.

    Args:
        gm: The graph module, changed in place; its code is generated again at its next use.
        call_node: A ``call_module`` node of ``gm`` that calls a graph module.

    Returns:
        From each computing node of the submodule's graph to its copy in ``gm``.

    Raises:
        RegionError: The node is not in this graph, calls no graph module, or passes other
            arguments than that takes. ``gm`` is as before.

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
    """Return what is passed for each placeholder."""
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
    """Return the parent's name of an attribute of the submodule."""
    # What the parent holds itself, as fusing leaves it, is read there: a path through the
    # submodule would keep the submodule, though nothing calls it any more.
    if attribute_of(gm, name) is attribute_of(inner, name):
        return name
    return f"{path}.{name}"


def _replace(node: Node, value: Any) -> None:
    """Let the readers of ``node`` read ``value``, which may hold constants."""
    if isinstance(value, Node):
        node.replace_all_uses_with(value)
        return
    for user in list(node.users):
        user.args = map_arg(user.args, lambda item: value if item is node else item)
        user.kwargs = map_arg(user.kwargs, lambda item: value if item is node else item)


def _remove_unused(gm: GraphModule, path: str) -> None:
    """Delete the submodule unless the graph still reads it or something in it."""
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
