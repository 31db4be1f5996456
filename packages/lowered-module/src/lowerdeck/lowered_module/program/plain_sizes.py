"""Sizes that are multiples of a number, written as such.

Windowed attention pads an image to whole windows by ``(w - n % w) % w``. torch takes the padded
size for a sum, and sizes that follow for quotients of it, each with a bound of its own: the size
of a window, ``m // (m // w)``, seems to be as large as the image. Written as ``(n + w - 1) // w *
w`` it is ``w``.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from lowerdeck.torch_base import (
    copy_graph_module,
    expression_of,
    hint_of,
    pytree,
    renamed_outputs,
    varies,
    with_parts,
)


def with_plain_sizes(program: ExportedProgram) -> ExportedProgram:
    """Return a program whose padded sizes are products, and its other sizes those of these.

    Args:
        program: Not changed, and returned itself if it pads nothing so.
    """
    if not any(_padding_of(node) for node in program.graph.nodes):
        return program
    copied = copy_graph_module(program.graph_module)
    _rewrite(copied.graph)
    copied.recompile()
    signature = renamed_outputs(program.graph_signature, copied.graph)
    return with_parts(program, graph_module=copied, graph_signature=signature)


def _padding_of(node: Node) -> tuple[Node, int] | None:
    """Return what a size pads to a multiple, and of which number; None if it is no padding."""
    number = _remainder(node)
    if number is None or not isinstance(node.args[0], Node):
        return None
    rest = node.args[0]
    if rest.target is not operator.sub or rest.args[0] != number:
        return None
    inner: Any = rest.args[1]
    if not isinstance(inner, Node) or _remainder(inner) != number:
        return None
    size: Any = inner.args[0]
    return (size, number) if isinstance(size, Node) else None


def _remainder(node: Node) -> int | None:
    number = node.args[1] if node.target is operator.mod else None
    return number if isinstance(number, int) and number > 0 else None


def _rewrite(graph: Graph) -> None:
    """Rewrite paddings, and write all sizes anew."""
    replaced: dict[Any, Any] = {}
    for node in list(graph.nodes):
        padding = _padding_of(node)
        if padding is None or not varies(node.meta["val"]):
            continue
        size, number = padding
        with graph.inserting_before(node):
            made = size
            for target, other in (
                *((operator.add, number - 1), (operator.floordiv, number)),
                *((operator.mul, number), (operator.sub, size)),
            ):
                value = made.meta["val"]
                made = graph.call_function(target, (made, other))
                made.meta = {"val": target(value, _number(other))}
        replaced[expression_of(node.meta["val"])] = expression_of(made.meta["val"])
        node.replace_all_uses_with(made)
        graph.erase_node(node)
    known: dict[Any, Any] = {}

    def plain(number: Any) -> Any:
        if not varies(number):
            return number
        expression = expression_of(number)
        if expression not in known:
            found = expression.xreplace(replaced)
            while found != expression:
                expression, found = found, found.xreplace(replaced)
            known[expression_of(number)] = found
        found = known[expression_of(number)]
        if found == expression_of(number):
            return number
        if found.is_number:
            return int(found)
        return number.node.shape_env.create_symintnode(found, hint=hint_of(number))

    for node in list(graph.nodes):
        if "val" not in node.meta:
            continue
        before = node.meta["val"]
        value = node.meta["val"] = pytree.tree_map(lambda one: _plain(one, plain), before)
        if (
            isinstance(value, int)
            and isinstance(before, torch.SymInt)
            and node.op != "placeholder"
        ):
            _replace_by(node, value)


def _replace_by(node: Node, number: int) -> None:
    """Replace a size that turned out to be one number."""

    def replaced(one: Node) -> Any:
        return number if one is node else one

    for user in list(node.users):
        user.args, user.kwargs = map_arg((user.args, user.kwargs), replaced)
    node.graph.erase_node(node)


def _number(size: Any) -> Any:
    return size.meta["val"] if isinstance(size, Node) else size


def _plain(value: Any, plain: Any) -> Any:
    if isinstance(value, torch.SymInt):
        return plain(value)
    if not isinstance(value, torch.Tensor):
        return value
    shape, strides = (tuple(map(plain, each)) for each in (value.shape, value.stride()))
    if all(
        a is b for a, b in zip((*shape, *strides), (*value.shape, *value.stride()), strict=True)
    ):
        return value
    return value.new_empty_strided(shape, strides)
