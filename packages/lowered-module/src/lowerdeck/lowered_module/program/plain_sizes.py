"""Rewrite padded sizes as multiples of a number.

Windowed attention pads an image to whole windows by ``(w - n % w) % w``. torch records the padded
size as a sum, and dependent sizes as quotients of it, each with a separate bound: the size of a
window, ``m // (m // w)``, is then bounded only by the size of the image. If ``m`` is written as
``(n + w - 1) // w * w``, the window size simplifies to ``w``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from lowerdeck.lowered_module.program.copies import rewritten
from lowerdeck.lowered_module.program.graphs import replace_input
from lowerdeck.torch_base import expression_of, hint_of, new_fake, pytree, varies


def with_plain_sizes(program: ExportedProgram, *, in_place: bool = False) -> ExportedProgram:
    """Return a program whose padded sizes are products, with dependent sizes updated.

    Args:
        program: Any program; returned itself if it has no such padding.
        in_place: Whether to change the graph of the program instead of a copy.
    """
    pads = any(_padding_of(node) for node in program.graph.nodes)
    return rewritten(program, _rewrite, in_place=in_place) if pads else program


def _padding_of(node: Node) -> tuple[Node, int] | None:
    """Return ``(size, n)`` if ``node`` computes ``(n - size % n) % n``, else None."""
    match node:
        case Node(
            target=operator.mod,
            args=(
                Node(
                    target=operator.sub,
                    args=(int(first), Node(target=operator.mod, args=(Node() as size, int(last)))),
                ),
                int(number),
            ),
        ) if first == last == number > 0:
            return size, number
    return None


def _rewrite(graph: Graph) -> bool:
    """Rewrite paddings, then all sizes."""
    replaced: dict[Any, Any] = {}
    for node in list(graph.nodes):
        padding = _padding_of(node)
        if padding is None or not varies(node.meta["val"]):
            continue
        size, number = padding
        with graph.inserting_before(node):
            product = size
            for target, other in (
                *((operator.add, number - 1), (operator.floordiv, number)),
                *((operator.mul, number), (operator.sub, size)),
            ):
                value = target(product.meta["val"], number_of(other))
                product = graph.call_function(target, (product, other))
                product.meta = {"val": value}
        replaced[expression_of(node.meta["val"])] = expression_of(product.meta["val"])
        node.replace_all_uses_with(product)
        graph.erase_node(node)

    paddings = frozenset(replaced.items())
    sizes: dict[Any, Any] = {}

    def plain(number: Any) -> Any:
        if not isinstance(number, torch.SymInt):
            return number
        expression = expression_of(number)
        if expression not in sizes:
            size = _rewritten_size(expression, paddings)
            create = number.node.shape_env.create_symintnode
            new = int(size) if size.is_number else create(size, hint=hint_of(number))
            sizes[expression] = None if size == expression else new
        return number if sizes[expression] is None else sizes[expression]

    for node in list(graph.nodes):
        before = node.meta.get("val")
        if before is None:
            continue
        convert = partial(_with_sizes, plain=plain)
        # ``tree_map`` leaves cyclic garbage at each call.
        is_tree = isinstance(before, (tuple, list))
        value = node.meta["val"] = pytree.tree_map(convert, before) if is_tree else convert(before)
        if isinstance(before, torch.SymInt) and node.op != "placeholder" and type(value) is int:
            # The size simplified to a number.
            for user in list(node.users):
                replace_input(user, node, value)
            graph.erase_node(node)
    return True


@lru_cache(2**14)
def _rewritten_size(expression: Any, paddings: frozenset[tuple[Any, Any]]) -> Any:
    result = expression.xreplace(dict(paddings))
    return result if result == expression else _rewritten_size(result, paddings)


def number_of(size: Any) -> Any:
    """Return the number of a size, which may be a node."""
    return size.meta["val"] if isinstance(size, Node) else size


def _with_sizes(value: Any, plain: Callable[[Any], Any]) -> Any:
    if isinstance(value, torch.SymInt):
        return plain(value)
    if not isinstance(value, torch.Tensor):
        return value
    before = (*value.shape, *value.stride())
    after = [plain(size) for size in before]
    if all(map(operator.is_, before, after)):
        return value
    return new_fake(value, after[: value.dim()], after[value.dim() :])
