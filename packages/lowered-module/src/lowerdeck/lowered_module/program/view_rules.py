"""Rules that commute operators with a preceding view that merges dimensions.

``late_views`` moves such views towards the outputs, because XNNPACK's reshape infers only one
dynamic size. A rule takes a call and the factors of its merged input (see ``view_factors``). It
returns the call on the unmerged input, and the factors of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, cast

import torch
from torch.fx import Graph, Node

from lowerdeck.lowered_module.program.view_factors import (
    SEVERAL,
    Factors,
    Sizes,
    drop_ones,
    equal_sizes,
    factor_view,
    flat_dims,
    flat_sizes,
    is_like,
    is_one,
    only_factor,
    shape_of,
    unmerged_factors,
)
from lowerdeck.torch_base import arguments_of, varies

_aten = torch.ops.aten
Call: TypeAlias = tuple[Any, dict[str, Any], Factors]
"""Operator and changed arguments of a call on unmerged inputs, and the factors of its result."""
Rule: TypeAlias = Callable[[Node, Factors], Call | None]
"""Returns the call on the unmerged first argument; None if the call needs the merged one."""


def _keep_dims(node: Node, factors: Factors) -> Call | None:
    is_plain = node.kwargs.get("memory_format") in _PLAIN
    return (node.target, {}, factors) if is_plain else None


_PLAIN = (None, torch.contiguous_format, torch.preserve_format)


def _linear(node: Node, factors: Factors) -> Call | None:
    if len(factors[-1]) != 1:
        return None
    return node.target, {}, (*factors[:-1], (shape_of(node)[-1],))


def _layer_norm(node: Node, factors: Factors) -> Call | None:
    folded: Any = arguments_of(node)["normalized_shape"]
    is_whole = all(len(factor) == 1 for factor in factors[-len(folded) :])
    return (node.target, {}, factors) if is_whole else None


def _norm_of_channels(node: Node, factors: Factors) -> Call | None:
    return (node.target, {}, factors) if len(factors[0]) == len(factors[1]) == 1 else None


def _resize_dim(node: Node, factors: Factors) -> Call | None:
    """Rule of operators that change the size of one dimension."""
    shape = shape_of(node)
    axis = int(arguments_of(node).get("dim", -1)) % len(shape)
    place = only_factor(factors[axis])
    if len(shape) != len(factors) or place is None:
        return None
    new = tuple(shape[axis] if at == place else size for at, size in enumerate(factors[axis]))
    dim = sum(map(len, factors[:axis])) + place
    return node.target, {"dim": dim}, (*factors[:axis], new, *factors[axis + 1 :])


def _reduce_along(node: Node, factors: Factors) -> Call | None:
    """Rule of operators that normalize along one dimension."""
    axis = int(arguments_of(node)["dim"]) % len(factors)
    dim = len(flat_sizes(factors[:axis]))
    return (node.target, {"dim": dim}, factors) if len(factors[axis]) == 1 else None


def product_factors(node: Node, factors: Mapping[Any, Factors]) -> Factors | None:
    """Return the factors of a matrix product or attention on unmerged inputs, or None.

    Either the batch or the rows of the first operand may be merged. If it is the batch, the other
    operands have the same factors.
    """
    first, *others = (source for source in node.args[:3] if isinstance(source, Node))
    factors = {x: drop_ones(factors[x]) for x in (first, *others) if x in factors}
    args = arguments_of(node)
    if node.target is ATTENTION and (varies(shape_of(first)[-1]) or any(map(args.get, _OPTIONS))):
        return None
    if first not in factors or len(factors[first][-1]) != 1 or len(shape_of(first)) < MATRIX:
        return None
    *batch, rows, _ = factors[first]
    is_split = any(len(factor) > 1 for factor in batch)
    if is_split == (len(rows) > 1) or (is_split and node.target is ATTENTION):
        return None
    for other in others:
        if len(shape_of(other)) != len(factors[first]):
            return None
        own = factors.get(other) if is_split else unmerged_factors(other)
        if own is None or not all(map(equal_sizes, own[:-2], batch)):
            return None
        if len(own[-1]) != 1 or len(own[-2]) != 1:
            return None
    return (*batch, rows, (shape_of(node)[-1],))


def broadcast_factors(node: Node, factors: Mapping[Any, Factors]) -> Factors | None:
    """Return the factors of an elementwise result: those of its operand of the same shape.

    The result is None if another operand does not broadcast to the unmerged tensor: it has neither
    the same factors, nor size 1 in each dimension that merges several sizes.
    """
    operands = node.all_input_nodes
    first = next((x for x in operands if x in factors and is_like(x, node)), None)
    if first is None:
        return None
    for operand in operands:
        if not isinstance(operand.meta["val"], torch.Tensor):
            return None
        own = factors.get(operand, unmerged_factors(operand))
        result = factors[first][len(factors[first]) - len(own) :]
        if not is_like(operand, node) and not all(map(_is_broadcast, own, result)):
            return None
    return factors[first]


def _is_broadcast(factor: Sizes, result: Sizes) -> bool:
    return equal_sizes(factor, result) or len(result) == 1 or all(map(is_one, factor))


def _permute(node: Node, factors: Factors) -> Call | None:
    order, numbers = order_of(node), flat_dims(factors)
    dims = [dim for axis in order for dim in numbers[axis]]
    return _aten.permute.default, {"dims": dims}, tuple(factors[axis] for axis in order)


def order_of(node: Node) -> list[int]:
    """Return the input's dimension for each dimension of a permutation's result."""
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
"""Operators for which ``broadcast_factors`` is the rule."""
ATTENTION = _aten.scaled_dot_product_attention.default
PRODUCTS = frozenset({_aten.bmm.default, _aten.matmul.default, ATTENTION})
"""Operators for which ``product_factors`` is the rule."""
_OPTIONS = ("attn_mask", "dropout_p", "is_causal", "enable_gqa")
MATRIX = 3
"""Dimensions of a batch of matrices."""
MOVES = frozenset({_aten.permute.default, _aten.permute_copy.default, _aten.transpose.int})
"""Permutations."""
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
        _keep_dims,
    ),
    **dict.fromkeys([_aten.slice.Tensor, _aten.glu.default], _resize_dim),
    **dict.fromkeys([_aten.softmax.int, _aten._softmax.default], _reduce_along),
    **dict.fromkeys(MOVES, _permute),
    **dict.fromkeys([_aten.batch_norm.default, _aten.group_norm.default], _norm_of_channels),
    _aten.linear.default: _linear,
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
"""Views with the same order of elements."""


def find_factors(graph: Graph) -> dict[Node, Factors]:
    """Return the factors of all results that can stay unmerged."""
    unmerged: dict[Node, Factors] = {}
    for node in graph.nodes:
        factors = None
        if node.target in VIEWS:
            source = node.args[0]
            before = flat_sizes(unmerged[source]) if source in unmerged else shape_of(source)
            factors = factor_view(before, shape_of(node))
            if factors is not None and not _spares_views(factors):
                factors = None
        elif node.target in PRODUCTS:
            factors = product_factors(node, unmerged)
        elif node.target in BROADCASTS:
            factors = broadcast_factors(node, unmerged)
        elif node.target in RULES and node.args[0] in unmerged:
            call = RULES[node.target](node, unmerged[cast("Node", node.args[0])])
            factors = None if call is None else call[2]
        if factors is not None:
            unmerged[node] = factors
    return unmerged


def _spares_views(factors: Factors) -> bool:
    """Return whether keeping the factors unmerged may make views unnecessary.

    The result is False for Swin's windows, whose batch merges three dynamic sizes: unmerged, these
    would leave too few of XNNPACK's six dimensions for the heads of an attention.
    """
    dynamic = [sum(map(varies, factor)) for factor in factors if any(map(varies, factor))]
    return sum(dynamic) >= SEVERAL and (dynamic != [_WINDOWS] or len(factors) < MATRIX)


_WINDOWS = 3
"""Dynamic sizes of the windows of a batch of images: batch, rows and columns."""
