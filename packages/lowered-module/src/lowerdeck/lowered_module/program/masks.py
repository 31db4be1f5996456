"""Simplify masks and biases of attention.

transformers computes a mask with a row for each query, by a gather at all positions and
comparisons of positions with 0. With dynamic sizes it is not a constant, so each call would
compute it in kernels outside of the delegate. Attention broadcasts its mask instead. Attention
with a finite bias is decomposed, because no row can be masked completely.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from lowerdeck.lowered_module.program.constants import constant_inputs
from lowerdeck.lowered_module.program.copies import rewritten
from lowerdeck.lowered_module.program.merged_sizes import equal_sizes, shape_of
from lowerdeck.lowered_module.program.plain_sizes import number_of
from lowerdeck.torch_base import arguments_of, varies

_aten = torch.ops.aten
_ATTENTION = _aten.scaled_dot_product_attention.default
ARANGE = (_aten.arange.default, _aten.arange.start, _aten.arange.start_step)
_AND = (_aten.__and__.Tensor, _aten.bitwise_and.Tensor, _aten.logical_and.default)
_WHERE = (_aten.where.self, _aten.where.ScalarOther)
_ONES = (_aten.ones.default, _aten.new_ones.default, _aten.ones_like.default)
_EMBEDDING = _aten.embedding.default
_MOVES = (_aten.expand.default, _aten.unsqueeze.default, _aten.view.default, _aten.permute.default)
_CHECK = _aten._assert_tensor_metadata.default
_SAME_NUMBERS = (
    *(_aten.to.dtype, _aten.to.device, _aten.to.dtype_layout, _aten._to_copy.default),
    *(_aten.clone.default, _aten.contiguous.default, _aten.alias.default, _aten.slice.Tensor),
)
"""Operators that change no number where the sizes and the dtype stay."""


@dataclass(frozen=True, slots=True)
class Positions:
    """The numbers from 0 along one dimension; the other dimensions have size 1.

    Attributes:
        count: Number of positions, or the node of a symbolic one.
    """

    axis: int
    count: Any


_TRUE = "true"
"""Marks a tensor that is True everywhere."""
_FINITE = "finite"
"""Marks a tensor without infinities and NaN."""
_MOST_BYTES = 1 << 20
"""Largest table that is read for it."""
_LOWEST = -1e30
"""Numbers below make any sum with finite scores invisible to a softmax."""


def with_short_masks(program: ExportedProgram) -> ExportedProgram:
    """Return a program whose attention masks have no repeated rows.

    A gather at all positions becomes a view; parts of a mask that are True everywhere, and its
    expansion, are removed. Attention with a bias from a table becomes products and a softmax.

    Args:
        program: A functional program; not changed, and returned itself if it has no such mask.

    Source: ``transformers.masking_utils`` of transformers 5.24.
    """
    has_positions = any(node.target in ARANGE for node in program.graph.nodes)
    if not has_positions:
        return program
    names = _finite_tables(program)
    return rewritten(program, lambda graph: _shorten(graph, names))


def _finite_tables(program: ExportedProgram) -> set[str]:
    """Return the names of small, finite constants that are used as lookup tables."""
    read = {node.args[0] for node in program.graph.nodes if node.target is _EMBEDDING}
    tensors = {**program.state_dict, **program.constants}
    return {
        node.name
        for node, target in (constant_inputs(program) if read else {}).items()
        if node in read
        and tensors[target].nbytes <= _MOST_BYTES
        and bool(tensors[target].isfinite().all())
    }


def _shorten(graph: Graph, finite: Container[str]) -> bool:
    """Simplify the masks of a graph; return whether there was one."""
    facts: dict[Node, Any] = {
        node: _FINITE for node in graph.find_nodes(op="placeholder") if node.name in finite
    }
    unread: list[Node] = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        facts[node] = _known_of(node, facts)
        if node.target is _aten.index.Tensor:
            if _becomes_view(node, facts):
                unread.append(node)
        elif node.target is _ATTENTION:
            mask: Any = arguments_of(node)["attn_mask"]
            short: Any = None if facts.get(mask) is _TRUE else _without_repeats(mask, facts)
            if facts.get(short) is _FINITE and write_out(node, short, facts):
                unread.append(node)
            elif short is not mask:
                _give_mask(node, short)
                unread.append(mask)
    changed = bool(unread)
    erase_unread(graph, unread)
    return changed


def _give_mask(node: Node, mask: Any) -> None:
    if "attn_mask" in node.kwargs:
        node.kwargs = {**node.kwargs, "attn_mask": mask}
    else:
        node.args = (*node.args[:3], mask, *node.args[4:])


def write_out(node: Node, mask: Node | None, facts: Mapping[Any, Any]) -> bool:
    """Replace attention by products and a softmax; return whether its form is supported.

    Args:
        mask: A finite one, or None.
        facts: Facts about nodes.
    """
    args = arguments_of(node)
    query, key, value = (args[name] for name in ("query", "key", "value"))
    rank, width = len(shape_of(query)), shape_of(query)[-1]
    is_plain = not (args["dropout_p"] or args["is_causal"] or args["enable_gqa"])
    # With static sizes, a mask is a constant in the delegate.
    if not is_plain or varies(width) or not any(map(varies, shape_of(node))):
        return False
    scale = width**-0.5 if args["scale"] is None else args["scale"]
    if scale != 1.0:
        query = inserted(node, _aten.mul.Tensor, (query, scale), query.meta["val"])
    order = [*range(rank - 2), rank - 1, rank - 2]
    turned = inserted(node, _aten.permute.default, (key, order), key.meta["val"].mT)
    sizes = (*shape_of(query)[:-1], shape_of(key)[-2])
    value_of_scores = node.meta["val"].new_empty(sizes)
    scores = inserted(node, _aten.matmul.default, (query, turned), value_of_scores)
    for part in [] if mask is None else _summands(node, mask, facts):
        scores = inserted(node, _aten.add.Tensor, (scores, part), value_of_scores)
    weights = inserted(node, _aten.softmax.int, (scores, -1), value_of_scores)
    result = inserted(node, _aten.matmul.default, (weights, value), node.meta["val"])
    node.replace_all_uses_with(result)
    return True


def _summands(node: Node, mask: Any, facts: Mapping[Any, Any]) -> list[Node]:
    """Return the addends of attention scores: a bias, and a mask without heads."""
    if _is_same(mask):
        return _summands(node, mask.args[0], facts)
    if mask.target not in _WHERE or facts.get(mask.args[1]) is not _FINITE:
        return [mask]
    shown, bias, hidden = mask.args
    number = _number(hidden)
    if number is None or number > _LOWEST:
        return [mask]
    value = mask.meta["val"].new_empty(shape_of(shown))
    return [bias, inserted(node, _aten.where.Scalar, (shown, 0.0, number), value)]


def _number(value: Any) -> Any:
    """Return the finite number of an argument, or None."""
    if isinstance(value, Node) and value.target is _aten.scalar_tensor.default:
        value = value.args[0]
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None


def erase_unread(graph: Graph, unread: list[Node]) -> None:
    """Erase nodes that only metadata checks read, and the nodes that only they read.

    Otherwise the program would have to compute them.
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
    """Return ``Positions`` or ``_TRUE`` for a result, or None."""
    target: Any = node.target
    args: Any = node.args
    if target in ARANGE:
        return positions_of(arguments_of(node))
    if target in _ONES or (target is _aten.full.default and args[1] == 1):
        return _TRUE if _is_bool(node) else None
    if target in _WHERE:
        is_finite = all(facts.get(x) is _FINITE or _number(x) is not None for x in args[1:])
        return _FINITE if is_finite else None
    of = facts.get(args[0]) if args and isinstance(args[0], Node) else None
    if of is None:
        return None
    if of is _FINITE:
        return _FINITE if target is _EMBEDDING or target in _MOVES or _is_same(node) else None
    if of is _TRUE:
        is_both = target in _AND and facts.get(args[1]) is _TRUE
        return _TRUE if target in _MOVES or is_both or _is_same(node) else None
    if target is _aten.ge.Scalar:
        return _TRUE if args[1] == 0 else None
    if target is _aten.unsqueeze.default:
        axis = int(args[1]) % len(shape_of(node))
        return Positions(of.axis + (axis <= of.axis), of.count)
    is_zero = target is _aten.add.Tensor and type(args[1]) is int and args[1] == 0
    return of if is_zero or _is_same(node) else None


def positions_of(args: Mapping[str, Any]) -> Positions | None:
    """Return the positions of a range by its arguments."""
    is_plain = args.get("start", 0) == 0 and args.get("step", 1) == 1
    is_integer = args.get("dtype") in (None, torch.int64, torch.int32)
    end = args["end"]
    if not is_plain or not is_integer or isinstance(end, float):
        return None
    return Positions(0, end)


def _becomes_view(node: Node, facts: Mapping[Any, Any]) -> bool:
    """Replace a gather at all positions of each dimension, in order; return whether it was one."""
    args = arguments_of(node)
    source, indices = args["self"], args["indices"]
    rank = len(shape_of(node))
    sizes: list[Any] = [1] * rank
    axes = []
    for index in indices:
        positions = facts.get(index)
        if not isinstance(positions, Positions):
            return False
        # Indices of fewer dimensions are broadcast from the last.
        axes.append(positions.axis + rank - len(shape_of(index)))
        sizes[axes[-1]] = positions.count
    if axes != sorted(set(axes)) or len(axes) != len(shape_of(source)):
        return False
    for dim, axis in enumerate(axes):
        if not equal_sizes([number_of(sizes[axis])], shape_of(source)[dim : dim + 1]):
            source = inserted(node, _aten.slice.Tensor, (source, dim, 0, sizes[axis]))
    view = inserted(node, _aten.view.default, (source, sizes))
    node.replace_all_uses_with(view)
    return True


def inserted(node: Node, target: Any, args: tuple[Any, ...], value: Any = None) -> Node:
    """Insert a call before a node that it is a part of.

    Args:
        value: Its fake result; None to compute it.
    """
    with node.graph.inserting_before(node):
        call = node.graph.call_function(target, args)
    value = target(*map_arg(args, number_of)) if value is None else value
    call.meta = {**node.meta, "val": value}
    return call


def _without_repeats(mask: Any, facts: Mapping[Any, Any]) -> Any:
    """Return a mask that broadcasts to the same one, of the same rank."""
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
