"""Replace a call by the graph that it calls: the inverse of fusing."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from lowerdeck.graph_fuser._torch_private import defer_code
from lowerdeck.graph_fuser.errors import ForeignNodeError, InlineError
from lowerdeck.torch_base import attribute, has_attribute


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
        ForeignNodeError: The node is not in this graph.
        InlineError: It calls no graph module, or its arguments do not fit. ``gm`` is as before.

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
    inner = _callee(gm, call_node)
    env = _bind(inner, call_node)
    targets = _targets(gm, inner, str(call_node.target))
    _check_elements(call_node, inner)
    copies: dict[Node, Node] = {}
    graph = gm.graph
    output = inner.graph.output_node()
    with graph.inserting_before(call_node):
        for node in inner.graph.nodes:
            if node.op in {"placeholder", "output"}:
                continue
            copy = graph.create_node(
                node.op,
                targets.get(node, node.target),
                _mapped(node.args, env),
                _mapped(node.kwargs, env),
                node.name,
                node.type,
            )
            copy.meta.update(node.meta)
            env[node] = copies[node] = copy
    _hand_over(call_node, _mapped(output.args[0], env))
    graph.erase_node(call_node)
    _remove_unused(gm, str(call_node.target))
    defer_code(gm)
    return copies


def _callee(gm: GraphModule, call_node: Node) -> GraphModule:
    if call_node.graph is not gm.graph or (
        call_node not in gm.graph.find_nodes(op=call_node.op, target=call_node.target)
    ):
        raise ForeignNodeError(
            f"Node {call_node.name!r} is not in the graph of the module passed."
        )
    target = str(call_node.target)
    if call_node.op != "call_module" or not has_attribute(gm, target):
        raise InlineError(
            f"Node {call_node.name!r} calls no submodule; expected a call_module node."
        )
    inner = attribute(gm, target)
    if not isinstance(inner, GraphModule):
        raise InlineError(
            f"Submodule {target!r} is a {type(inner).__name__}; only a GraphModule can be put in "
            "place."
        )
    return inner


def _bind(inner: GraphModule, call_node: Node) -> dict[Node, Any]:
    """Return the argument of each placeholder."""
    env: dict[Node, Any] = {}
    given = list(call_node.args)
    names = dict(call_node.kwargs)
    for node in inner.graph.nodes:
        if node.op != "placeholder":
            continue
        if str(node.target).startswith("*"):
            raise InlineError(
                f"Submodule {call_node.target!r} takes any number of arguments ({node.target!r}); "
                "only fixed parameters can be put in place."
            )
        if given:
            env[node] = given.pop(0)
        elif str(node.target) in names:
            env[node] = names.pop(str(node.target))
        elif node.args:
            env[node] = node.args[0]
        else:
            raise InlineError(
                f"Node {call_node.name!r} passes nothing for parameter {node.target!r} of "
                f"submodule {call_node.target!r}."
            )
    if given or names:
        raise InlineError(
            f"Node {call_node.name!r} passes more arguments than submodule {call_node.target!r} "
            "takes."
        )
    return env


def _targets(gm: GraphModule, inner: GraphModule, path: str) -> dict[Node, str]:
    """Return the parent's name of each attribute that the submodule's graph reads."""
    targets: dict[Node, str] = {}
    for node in inner.graph.nodes:
        if node.op not in {"get_attr", "call_module"}:
            continue
        name = str(node.target)
        # What the parent holds itself, as fusing leaves it, is read there: a path through the
        # submodule would keep the submodule, though nothing calls it any more.
        same = has_attribute(gm, name) and attribute(gm, name) is attribute(inner, name)
        targets[node] = name if same else f"{path}.{name}"
    return targets


def _check_elements(call_node: Node, inner: GraphModule) -> None:
    """Raise unless every element that is taken of the call is one that its graph returns."""
    returned = inner.graph.output_node().args[0]
    for user in call_node.users:
        if user.target is not operator.getitem or not isinstance(returned, (tuple, list)):
            continue
        index = user.args[1]
        if isinstance(index, int) and not -len(returned) <= index < len(returned):
            raise InlineError(
                f"Node {user.name!r} takes element {index} of {call_node.name!r}, which returns "
                f"{len(returned)}."
            )


def _mapped(value: Any, env: Mapping[Node, Any]) -> Any:
    return map_arg(value, env.__getitem__)


def _hand_over(call_node: Node, value: Any) -> None:
    """Let the readers of the call read what the submodule's graph returns."""
    for user in list(call_node.users):
        if (
            isinstance(value, (tuple, list))
            and user.op == "call_function"
            and user.target is operator.getitem
            and isinstance(user.args[1], int)
        ):
            _replace(user, value[user.args[1]])
            call_node.graph.erase_node(user)
        else:
            _replace_in(user, call_node, value)


def _replace(node: Node, value: Any) -> None:
    if isinstance(value, Node):
        node.replace_all_uses_with(value)
        return
    for user in list(node.users):
        _replace_in(user, node, value)


def _replace_in(user: Node, node: Node, value: Any) -> None:
    if isinstance(value, Node):
        user.replace_input_with(node, value)
        return
    # fx replaces nodes by nodes only; a constant or a tuple is put in by hand.
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
        owner = attribute(gm, holder) if holder else gm
        if isinstance(owner, torch.nn.Module):
            delattr(owner, name)
