"""Masks of attention without repeated rows.

transformers computes a mask with a row for each query, by a gather at all positions and by
comparing positions with 0. With dynamic sizes none of this is a constant, so that each call would
compute it in kernels outside of the delegate. Attention broadcasts its mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from lowerdeck.lowered_module.program.copies import rewritten
from lowerdeck.lowered_module.program.merged_sizes import equal_sizes, shape_of
from lowerdeck.lowered_module.program.plain_sizes import number_of
from lowerdeck.torch_base import arguments_of

_aten = torch.ops.aten
_ATTENTION = _aten.scaled_dot_product_attention.default
_ARANGE = (_aten.arange.default, _aten.arange.start, _aten.arange.start_step)
_AND = (_aten.__and__.Tensor, _aten.bitwise_and.Tensor, _aten.logical_and.default)
_WHERE = (_aten.where.self, _aten.where.ScalarOther)
_ONES = (_aten.ones.default, _aten.new_ones.default, _aten.ones_like.default)
_CHECK = _aten._assert_tensor_metadata.default
_SAME_NUMBERS = (
    *(_aten.to.dtype, _aten.to.device, _aten.to.dtype_layout, _aten._to_copy.default),
    *(_aten.clone.default, _aten.contiguous.default, _aten.alias.default, _aten.slice.Tensor),
)
"""Operators that change no number where the sizes and the dtype stay."""


@dataclass(frozen=True, slots=True)
class _Positions:
    """The numbers from 0 along one dimension; the other dimensions have size 1.

    Attributes:
        count: How many they are: a number, or the node of a symbolic one.
    """

    axis: int
    count: Any


_TRUE = "true"
"""Marks a tensor that is True everywhere."""


def with_short_masks(program: ExportedProgram) -> ExportedProgram:
    """Return a program whose attention takes masks without repeated rows.

    A gather at all positions becomes a view; a mask loses parts that are True everywhere, and its
    expansion.

    Args:
        program: A functional program; not changed, and returned itself if it has no such mask.

    Source: ``transformers.masking_utils`` of transformers 5.24.
    """
    has_positions = any(node.target in _ARANGE for node in program.graph.nodes)
    return rewritten(program, _shorten) if has_positions else program


def _shorten(graph: Graph) -> bool:
    """Shorten the masks of a graph; return whether there was one."""
    facts: dict[Node, Any] = {}
    unread: list[Node] = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        facts[node] = _known_of(node, facts)
        if node.target is _aten.index.Tensor:
            if _becomes_view(node, facts):
                unread.append(node)
        elif node.target is _ATTENTION:
            mask = arguments_of(node)["attn_mask"]
            short = None if facts.get(mask) is _TRUE else _without_repeats(mask, facts)
            if short is not mask:
                _give_mask(node, short)
                unread.append(mask)
    changed = bool(unread)
    _erase(graph, unread)
    return changed


def _give_mask(node: Node, mask: Any) -> None:
    if "attn_mask" in node.kwargs:
        node.kwargs = {**node.kwargs, "attn_mask": mask}
    else:
        node.args = (*node.args[:3], mask, *node.args[4:])


def _erase(graph: Graph, unread: list[Node]) -> None:
    """Erase nodes that nothing reads but checks of their dtype, and what they alone read.

    Left in the program, they would have to be computed.
    """
    erased: set[Node] = set()
    while unread:
        node = unread.pop()
        checks = [user for user in node.users if user.target is _CHECK]
        if node in erased or node.op != "call_function" or len(checks) < len(node.users):
            continue
        unread += node.all_input_nodes
        for dead in (*checks, node):
            graph.erase_node(dead)
            erased.add(dead)


def _known_of(node: Node, facts: Mapping[Any, Any]) -> Any:
    """Return ``_Positions`` or ``_TRUE`` of a result, or None."""
    target: Any = node.target
    args: Any = node.args
    if target in _ARANGE:
        return _arange(arguments_of(node))
    if target in _ONES or (target is _aten.full.default and args[1] == 1):
        return _TRUE if _is_bool(node) else None
    of = facts.get(args[0]) if args and isinstance(args[0], Node) else None
    if of is None:
        return None
    if of is _TRUE:
        is_shape = target in (_aten.expand.default, _aten.unsqueeze.default, _aten.view.default)
        is_both = target in _AND and facts.get(args[1]) is _TRUE
        return _TRUE if is_shape or is_both or _is_same(node) else None
    if target is _aten.ge.Scalar:
        return _TRUE if args[1] == 0 else None
    if target is _aten.unsqueeze.default:
        axis = int(args[1]) % len(shape_of(node))
        return _Positions(of.axis + (axis <= of.axis), of.count)
    is_zero = target is _aten.add.Tensor and type(args[1]) is int and args[1] == 0
    return of if is_zero or _is_same(node) else None


def _arange(args: Mapping[str, Any]) -> _Positions | None:
    is_plain = args.get("start", 0) == 0 and args.get("step", 1) == 1
    is_integer = args.get("dtype") in (None, torch.int64, torch.int32)
    end = args["end"]
    if not is_plain or not is_integer or isinstance(end, float):
        return None
    return _Positions(0, end)


def _becomes_view(node: Node, facts: Mapping[Any, Any]) -> bool:
    """Replace a gather at all positions of each dimension, in order; return whether it was one."""
    args = arguments_of(node)
    source, indices = args["self"], args["indices"]
    rank = len(shape_of(node))
    sizes: list[Any] = [1] * rank
    axes = []
    for index in indices:
        positions = facts.get(index)
        if not isinstance(positions, _Positions):
            return False
        # Indices of fewer dimensions are broadcast from the last.
        axes.append(positions.axis + rank - len(shape_of(index)))
        sizes[axes[-1]] = positions.count
    if axes != sorted(set(axes)) or len(axes) != len(shape_of(source)):
        return False
    for dim, axis in enumerate(axes):
        if not equal_sizes([number_of(sizes[axis])], shape_of(source)[dim : dim + 1]):
            source = _inserted(node, _aten.slice.Tensor, (source, dim, 0, sizes[axis]))
    view = _inserted(node, _aten.view.default, (source, sizes))
    node.replace_all_uses_with(view)
    return True


def _inserted(node: Node, target: Any, args: tuple[Any, ...]) -> Node:
    """Insert a call before a node that it does a part of."""
    with node.graph.inserting_before(node):
        call = node.graph.call_function(target, args)
    call.meta = {**node.meta, "val": target(*map_arg(args, number_of))}
    return call


def _without_repeats(mask: Any, facts: Mapping[Any, Any]) -> Any:
    """Return a mask that attention broadcasts to the same, of as many dimensions."""
    if not isinstance(mask, Node):
        return mask
    inner: Any = None
    args: Any = mask.args
    if mask.target is _aten.expand.default or _is_same(mask):
        inner = args[0]
    elif mask.target in _AND and _is_bool(mask):
        first, second = args
        if _TRUE in (facts.get(first), facts.get(second)):
            inner = second if facts.get(first) is _TRUE else first
    elif mask.target in _WHERE and facts.get(args[0]) is _TRUE:
        inner = args[1]
    if not isinstance(inner, Node) or len(shape_of(inner)) != len(shape_of(mask)):
        return mask
    if inner.meta["val"].dtype is not mask.meta["val"].dtype:
        return mask
    return _without_repeats(inner, facts)


def _is_same(node: Node) -> bool:
    source = node.args[0] if node.target in _SAME_NUMBERS else None
    if not isinstance(source, Node):
        return False
    before, after = source.meta["val"], node.meta["val"]
    return before.dtype == after.dtype and equal_sizes(before.shape, after.shape)


def _is_bool(node: Node) -> bool:
    return bool(node.meta["val"].dtype is torch.bool)
