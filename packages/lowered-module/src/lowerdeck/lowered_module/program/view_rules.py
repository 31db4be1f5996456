"""For each operator: may a view before it that merges dimensions be moved after it, and how.

``late_views`` moves such views towards the outputs, since XNNPACK's reshape infers one size only.
A rule gets the node and its *parts*: for each dimension of its input, the sizes that the view
merges into it. It returns the call on the unmerged tensor, and the parts of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, cast

import torch
from torch.fx import Graph, Node

from lowerdeck.lowered_module.program.merged_sizes import (
    SEVERAL,
    Parts,
    Sizes,
    equal_sizes,
    flat_sizes,
    is_like,
    is_one,
    merged_sizes,
    numbered,
    only_part,
    shape_of,
    whole_parts,
    without_ones,
)
from lowerdeck.torch_base import arguments_of, varies

_aten = torch.ops.aten
Call: TypeAlias = tuple[Any, dict[str, Any], Parts]
"""The operator, its arguments that differ on the unmerged tensor, and the parts of its result."""
Rule: TypeAlias = Callable[[Node, Parts], Call | None]
"""Returns the call on a node's unmerged first argument, or None if it needs the merged one."""


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
    """Rule of operators that change the size of one dimension."""
    shape = shape_of(node)
    axis = int(arguments_of(node).get("dim", -1)) % len(shape)
    place = only_part(parts[axis])
    if len(shape) != len(parts) or place is None:
        return None
    new = tuple(shape[axis] if at == place else size for at, size in enumerate(parts[axis]))
    dim = sum(map(len, parts[:axis])) + place
    return node.target, {"dim": dim}, (*parts[:axis], new, *parts[axis + 1 :])


def _within(node: Node, parts: Parts) -> Call | None:
    """Rule of operators that compute along one dimension."""
    axis = int(arguments_of(node)["dim"]) % len(parts)
    dim = len(flat_sizes(parts[:axis]))
    return (node.target, {"dim": dim}, parts) if len(parts[axis]) == 1 else None


def product_parts(node: Node, parts: Mapping[Any, Parts]) -> Parts | None:
    """Return the parts of a product, or of attention to keys: those of its first operand's rows.

    If the second operand has one matrix for each batch element, matrices broadcast over rows.
    """
    first, *others = (source for source in node.args[:3] if isinstance(source, Node))
    parts = {x: without_ones(parts[x]) for x in (first, *others) if x in parts}
    args = arguments_of(node)
    if node.target is ATTENTION and (varies(shape_of(first)[-1]) or any(map(args.get, _OPTIONS))):
        return None
    if first not in parts or len(parts[first][-1]) != 1 or len(shape_of(first)) < MATRIX:
        return None
    *batch, rows, _ = parts[first]
    is_split = any(len(part) > 1 for part in batch)
    # Either the batch or the rows may be merged.
    if is_split == (len(rows) > 1) or (is_split and node.target is ATTENTION):
        return None
    for other in others:
        if len(shape_of(other)) != len(parts[first]):
            return None
        own = parts.get(other) if is_split else whole_parts(other)
        if own is None or not all(map(equal_sizes, own[:-2], batch)):
            return None
        if len(own[-1]) != 1 or len(own[-2]) != 1:
            return None
    return (*batch, rows, (shape_of(node)[-1],))


def broadcast_parts(node: Node, parts: Mapping[Any, Parts]) -> Parts | None:
    """Return the parts of an elementwise result: those of an operand of the same shape.

    Other operands have the same parts, or size 1 in place of several.
    """
    operands = node.all_input_nodes
    first = next((one for one in operands if one in parts and is_like(one, node)), None)
    if first is None:
        return None
    for operand in operands:
        if not isinstance(operand.meta["val"], torch.Tensor):
            return None
        own = parts.get(operand, whole_parts(operand))
        result = parts[first][len(parts[first]) - len(own) :]
        if not is_like(operand, node) and not all(map(_is_broadcast, own, result)):
            return None
    return parts[first]


def _is_broadcast(part: Sizes, result: Sizes) -> bool:
    return equal_sizes(part, result) or len(result) == 1 or all(map(is_one, part))


def _turned(node: Node, parts: Parts) -> Call | None:
    order, numbers = order_of(node), numbered(parts)
    dims = [dim for axis in order for dim in numbers[axis]]
    return _aten.permute.default, {"dims": dims}, tuple(parts[axis] for axis in order)


def order_of(node: Node) -> list[int]:
    """Return which dimension of its input each dimension of a permutation is."""
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
"""Operators for which ``broadcast_parts`` is the rule."""
ATTENTION = _aten.scaled_dot_product_attention.default
PRODUCTS = frozenset({_aten.bmm.default, _aten.matmul.default, ATTENTION})
"""Operators for which ``product_parts`` is the rule."""
_OPTIONS = ("attn_mask", "dropout_p", "is_causal", "enable_gqa")
MATRIX = 3
"""Dimensions of a batch of matrices."""
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
    **dict.fromkeys([_aten.softmax.int, _aten._softmax.default], _within),
    **dict.fromkeys(MOVES, _turned),
    **dict.fromkeys([_aten.batch_norm.default, _aten.group_norm.default], _channels),
    _aten.linear.default: _layer,
    _aten.layer_norm.default: _layer_norm,
}
VIEWS = frozenset(
    {
        *(_aten.view.default, _aten._unsafe_view.default, _aten.view_copy.default),
        *(_aten.reshape.default, _aten.flatten.using_ints, _aten.unflatten.int),
        *(_aten.squeeze.dim, _aten.squeeze.dims, _aten.unsqueeze.default),
        *(_aten.squeeze_copy.dim, _aten.squeeze_copy.dims, _aten.unsqueeze_copy.default),
    }
)
"""Operators that only give another shape."""


def unmerged_sizes(graph: Graph) -> dict[Node, Parts]:
    """Return the parts of results that may stay unmerged."""
    found: dict[Node, Parts] = {}
    for node in graph.nodes:
        parts = None
        if node.target in VIEWS:
            source = node.args[0]
            before = flat_sizes(found[source]) if source in found else shape_of(source)
            parts = merged_sizes(before, shape_of(node))
            if parts is not None and not _spares_views(parts):
                parts = None
        elif node.target in PRODUCTS:
            parts = product_parts(node, found)
        elif node.target in BROADCASTS:
            parts = broadcast_parts(node, found)
        elif node.target in RULES and node.args[0] in found:
            call = RULES[node.target](node, found[cast("Node", node.args[0])])
            parts = None if call is None else call[2]
        if parts is not None:
            found[node] = parts
    return found


def _spares_views(parts: Parts) -> bool:
    """Return whether unmerged sizes may save views.

    A reshape supports one dynamic size. The batch of a window partition merges three of them;
    unmerged, they leave too few dimensions for the heads of an attention.
    """
    dynamic = [sum(map(varies, part)) for part in parts if any(map(varies, part))]
    return sum(dynamic) >= SEVERAL and (dynamic != [_WINDOWS] or len(parts) < MATRIX)


_WINDOWS = 3
"""Dynamic sizes of the windows of a batch of images: batch, rows and columns."""
