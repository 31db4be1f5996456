"""Operators that compute the same before and after a view that merges dimensions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch.fx import Node

from lowerdeck.lowered_module.program.merged_sizes import (
    Parts,
    is_like,
    is_one,
    numbered,
    only_part,
    shape_of,
)
from lowerdeck.torch_base import arguments_of

_aten = torch.ops.aten
Call: TypeAlias = tuple[Any, dict[str, Any], Parts]
"""The operator to call of a tensor in parts, arguments of other dimensions, the result's parts."""
Rule: TypeAlias = Callable[[Node, Parts], Call | None]
"""Returns how to compute a node of its first argument in parts; None if it needs the whole."""


def _same(node: Node, parts: Parts) -> Call | None:
    is_plain = node.kwargs.get("memory_format") in _PLAIN
    return (node.target, {}, parts) if is_plain else None


_PLAIN = (None, torch.contiguous_format, torch.preserve_format)


def _layer(node: Node, parts: Parts) -> Call | None:
    if len(parts[-1]) != 1:
        return None
    return node.target, {}, (*parts[:-1], (shape_of(node)[-1],))


def _layer_norm(node: Node, parts: Parts) -> Call | None:
    folded: Any = arguments_of(node)["normalized_shape"]
    is_whole = all(len(part) == 1 for part in parts[-len(folded) :])
    return (node.target, {}, parts) if is_whole else None


def _channels(node: Node, parts: Parts) -> Call | None:
    return (node.target, {}, parts) if len(parts[0]) == len(parts[1]) == 1 else None


def _along(node: Node, parts: Parts) -> Call | None:
    """Apply an operator that changes the size of one dimension."""
    shape = shape_of(node)
    axis = int(arguments_of(node).get("dim", -1)) % len(shape)
    place = only_part(parts[axis])
    if len(shape) != len(parts) or place is None:
        return None
    new = tuple(shape[axis] if at == place else size for at, size in enumerate(parts[axis]))
    dim = sum(map(len, parts[:axis])) + place
    return node.target, {"dim": dim}, (*parts[:axis], new, *parts[axis + 1 :])


def _broadcast(node: Node, parts: Parts) -> Call | None:
    """Apply an operator whose operands are like the result, or 1 where it has parts."""
    for operand in node.all_input_nodes:
        if not isinstance(operand.meta["val"], torch.Tensor):
            return None
        shape = shape_of(operand)
        missing = len(parts) - len(shape)
        is_whole = all(
            len(parts[missing + axis]) == 1 or is_one(size) for axis, size in enumerate(shape)
        )
        if not is_whole and not is_like(operand, node):
            return None
    return node.target, {}, parts


def _turned(node: Node, parts: Parts) -> Call | None:
    order, numbers = _order(node), numbered(parts)
    dims = [dim for axis in order for dim in numbers[axis]]
    return _aten.permute.default, {"dims": dims}, tuple(parts[axis] for axis in order)


def _order(node: Node) -> list[int]:
    rank = len(shape_of(node))
    args: Any = arguments_of(node)
    if "dims" in args:
        return [axis % rank for axis in args["dims"]]
    order = list(range(rank))
    first, second = args["dim0"], args["dim1"]
    order[first], order[second] = order[second], order[first]
    return order


BROADCASTS = frozenset(
    {
        *(_aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor),
        *(_aten.maximum.default, _aten.minimum.default),
    }
)
"""Operators with rules for two operands."""
MOVES = frozenset({_aten.permute.default, _aten.permute_copy.default, _aten.transpose.int})
"""Operators with rules that only move elements."""
RULES: Mapping[Any, Rule] = {
    **dict.fromkeys(
        [
            *(_aten.relu.default, _aten.gelu.default, _aten.silu.default, _aten.sigmoid.default),
            *(_aten.tanh.default, _aten.neg.default, _aten.abs.default, _aten.exp.default),
            *(_aten.hardswish.default, _aten.hardtanh.default, _aten.leaky_relu.default),
            *(_aten.elu.default, _aten.clamp.default, _aten.pow.Tensor_Scalar),
            *(_aten.clone.default, _aten.contiguous.default, _aten.alias.default),
            *(_aten.dropout.default, _aten.mul.Scalar, _aten.add.Scalar, _aten.div.Scalar),
        ],
        _same,
    ),
    **dict.fromkeys([_aten.slice.Tensor, _aten.glu.default], _along),
    **dict.fromkeys(MOVES, _turned),
    **dict.fromkeys(BROADCASTS, _broadcast),
    **dict.fromkeys([_aten.batch_norm.default, _aten.group_norm.default], _channels),
    _aten.linear.default: _layer,
    _aten.layer_norm.default: _layer_norm,
}
