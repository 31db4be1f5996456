"""Simplify masks and biases of attention.

transformers 5.24 builds a full mask, a row for each query, from ``arange`` positions: it gathers
an attention mask at all positions, and compares positions with 0 or with their neighbours to find
packed sequences. With dynamic sizes portable kernels compute the mask at each call. Therefore
parts that are constant for every size are folded, and repeated rows are left to broadcasting.
Attention with a bias that is never -inf is decomposed to products and a softmax, which XNNPACK
computes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from lowerdeck.lowered_module.program.constants import constant_inputs
from lowerdeck.lowered_module.program.copies import rewritten
from lowerdeck.lowered_module.program.foldable import ASSERTION
from lowerdeck.lowered_module.program.plain_sizes import number_of
from lowerdeck.lowered_module.program.view_factors import equal_sizes, is_like, is_one, shape_of
from lowerdeck.torch_base import arguments_of, new_fake, varies

_aten = torch.ops.aten
_ATTENTION = _aten.scaled_dot_product_attention.default
ARANGE = (_aten.arange.default, _aten.arange.start, _aten.arange.start_step)
_AND = (_aten.__and__.Tensor, _aten.bitwise_and.Tensor, _aten.logical_and.default)
_WHERE = (_aten.where.self, _aten.where.ScalarOther)
_ONES = (_aten.ones.default, _aten.new_ones.default, _aten.ones_like.default)
EMBEDDING = _aten.embedding.default
MOVES = (_aten.expand.default, _aten.unsqueeze.default, _aten.view.default, _aten.permute.default)
_COMPARISONS = {
    getattr(getattr(_aten, name), overload): getattr(operator, name)
    for name in ("eq", "ne", "lt", "le", "gt", "ge")
    for overload in ("Tensor", "Scalar")
}
_ELEMENTWISE = {
    _aten.add.Tensor: operator.add,
    _aten.sub.Tensor: operator.sub,
    **dict.fromkeys(_AND, operator.and_),
    _aten.logical_and.default: lambda first, other: int(bool(first) and bool(other)),
    **dict.fromkeys(_COMPARISONS, operator.sub),
}
"""The function of two operands that a result depends on: the difference, for comparisons."""
SAME_NUMBERS = (
    *(_aten.to.dtype, _aten.to.device, _aten.to.dtype_layout, _aten._to_copy.default),
    *(_aten.clone.default, _aten.contiguous.default, _aten.alias.default, _aten.slice.Tensor),
)
"""Operators that are no-ops if sizes and dtype do not change."""


class Line(NamedTuple):
    """The integers ``first + step * i`` along one dimension, equal along the others.

    Attributes:
        step: 0 for a constant; booleans are 0 or 1.
        axis: The dimension, from -1 for the last.
        base: A node with the same numbers whose other dimensions have size 1, or None.
    """

    first: int
    step: int = 0
    axis: int = -1
    base: Any = None


_MOST = 1 << 31
"""Products of larger numbers and a size might overflow int64."""
_FINITE = "finite"
"""Marks a tensor without infinities and NaN."""
_MOST_BYTES = 1 << 20
"""Largest constant that is checked for infinities."""
_LOWEST = -1e30
"""A score plus a smaller number is masked."""


def with_short_masks(program: ExportedProgram, *later: Callable[[Graph], bool]) -> ExportedProgram:
    """Return a program with simplified attention masks.

    A gather at all positions becomes a view; operands that are True everywhere, and expansions,
    are removed. Attention of dynamic shape with a bias from a finite table becomes matrix products
    and a softmax.

    Args:
        program: A functional program; not changed, and returned itself if nothing changes.
        *later: Further rewrites of the graph, applied afterwards.
    """
    has_positions = any(node.target in ARANGE for node in program.graph.nodes)
    if not has_positions:
        return rewritten(program, *later) if later else program
    return rewritten(program, partial(_shorten, finite=_finite_tables(program)), *later)


def _finite_tables(program: ExportedProgram) -> set[str]:
    """Return the names of small, finite constants that are used as lookup tables."""
    read = {node.args[0] for node in program.graph.nodes if node.target is EMBEDDING}
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
    shorts: dict[Any, Any] = {}
    unread: list[Node] = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        facts[node] = infer_fact(node, facts)
        base = getattr(facts[node], "base", None)
        if base not in (None, node) and is_like(base, node):
            node.replace_all_uses_with(base)
            unread.append(node)
        elif node.target is _aten.index.Tensor:
            if _replace_by_view(node, facts):
                unread.append(node)
        elif node.target is _ATTENTION:
            mask: Any = arguments_of(node)["attn_mask"]
            if mask not in shorts:
                shorts[mask] = None if _is_true(mask, facts) else _without_repeats(mask, facts)
            short = shorts[mask]
            if facts.get(short) is _FINITE and decompose_attention(node, short, facts):
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


def decompose_attention(node: Node, mask: Node | None, facts: Mapping[Any, Any]) -> bool:
    """Replace attention by products and a softmax; return False if it is not supported.

    Args:
        mask: A mask without infinities, or None.
        facts: Known facts about nodes: a ``Line`` or ``_FINITE``.
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
        query = insert_call(node, _aten.mul.Tensor, (query, scale), query.meta["val"])
    order = [*range(rank - 2), rank - 1, rank - 2]
    transposed = insert_call(node, _aten.permute.default, (key, order), key.meta["val"].mT)
    sizes = (*shape_of(query)[:-1], shape_of(key)[-2])
    value_of_scores = new_fake(node.meta["val"], sizes)
    scores = insert_call(node, _aten.matmul.default, (query, transposed), value_of_scores)
    for part in [] if mask is None else _summands(node, mask, facts):
        scores = insert_call(node, _aten.add.Tensor, (scores, part), value_of_scores)
    weights = insert_call(node, _aten.softmax.int, (scores, -1), value_of_scores)
    result = insert_call(node, _aten.matmul.default, (weights, value), node.meta["val"])
    node.replace_all_uses_with(result)
    return True


def _summands(node: Node, mask: Any, facts: Mapping[Any, Any]) -> list[Node]:
    """Return the addends of attention scores: a bias, and a mask without heads."""
    if _is_same(mask):
        return _summands(node, mask.args[0], facts)
    if mask.target not in _WHERE or facts.get(mask.args[1]) is not _FINITE:
        return [mask]
    visible, bias, masked = mask.args
    number = _number(masked)
    if number is None or number > _LOWEST:
        return [mask]
    value = new_fake(mask.meta["val"], shape_of(visible))
    return [bias, insert_call(node, _aten.where.Scalar, (visible, 0.0, number), value)]


def _number(value: Any) -> Any:
    """Return an argument as a number, or None if it is not a finite number."""
    if isinstance(value, Node) and value.target is _aten.scalar_tensor.default:
        value = value.args[0]
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None


def erase_unread(graph: Graph, unread: list[Node]) -> None:
    """Erase nodes that only metadata checks read, and the nodes that only they read."""
    erased: set[Node] = set()
    while unread:
        node = unread.pop()
        checks = [user for user in node.users if user.target is ASSERTION]
        if node in erased or node.op != "call_function" or len(checks) < len(node.users):
            continue
        unread += node.all_input_nodes
        for dead in (*checks, node):
            graph.erase_node(dead)
            erased.add(dead)


def infer_fact(node: Node, facts: Mapping[Any, Any]) -> Any:
    """Return the fact about the result of a node: a ``Line``, ``_FINITE`` or None."""
    target: Any = node.target
    args: Any = node.args
    if target in _WHERE:
        is_finite = all(facts.get(x) is _FINITE or _number(x) is not None for x in args[1:])
        return _FINITE if is_finite else None
    if args and isinstance(args[0], Node) and facts.get(args[0]) is _FINITE:
        return _FINITE if target is EMBEDDING or target in MOVES or _is_same(node) else None
    dtype = getattr(node.meta.get("val"), "dtype", None)
    line = _line_of(node, facts) if dtype in (torch.int64, torch.bool) else None
    if line is None or max(abs(line.first), abs(line.step)) >= _MOST:
        return None
    if dtype is torch.bool and (line.step or line.first not in (0, 1)):
        return None
    wide = _wide(node)
    base = line.base if line.base and line.base.meta["val"].dtype == dtype else None
    is_base = base is None and not set(wide) - {line.axis}
    step = line.step if line.axis in wide else 0
    return line._replace(step=step, base=node if is_base else base)


def _line_of(node: Node, facts: Mapping[Any, Any]) -> Line | None:
    """Return the line of a result of integers or booleans."""
    target: Any = node.target
    args = arguments_of(node)
    if target in ARANGE:
        return range_of(node)
    if target in _ONES or target is _aten.full.default:
        value = args.get("fill_value", 1)
        return Line(int(value)) if isinstance(value, int) else None
    if target in _ELEMENTWISE:
        lines: list[Any] = [Line(x) if type(x) is int else facts.get(x) for x in node.args[:2]]
        is_plain = not node.kwargs and all(isinstance(line, Line) for line in lines)
        return _combined(target, *lines) if is_plain else None
    rank = max(1, len(shape_of(node)))
    dim = args.get("dim")
    axis = dim % rank - rank if isinstance(dim, int) else 0
    if target is _aten.cat.default:
        return _joined(args["tensors"], axis, facts)
    source: Any = node.args[0] if node.args else None
    of = facts.get(source)
    if not isinstance(of, Line):
        return None
    if target is _aten.cumsum.default:
        return None if of.step else Line(of.first, of.first, axis)
    if target is _aten.diff.default:
        joined = _joined([args["prepend"], source], axis, facts)
        is_plain = args["n"] == 1 and args["append"] is None
        return Line(joined.step if joined.axis == axis else 0) if joined and is_plain else None
    if target not in MOVES and target not in SAME_NUMBERS:
        return None
    if target is _aten.slice.Tensor and axis == of.axis and not _is_same(node):
        start = args["start"] or 0
        is_plain = isinstance(start, int) and start >= 0
        return Line(of.first + of.step * start, of.step * args["step"], axis) if is_plain else None
    if not of.step or target in (_aten.expand.default, _aten.slice.Tensor) or _is_same(node):
        return of
    # A view that inserts or drops sizes of 1.
    shapes = [[shape_of(x)[dim] for dim in _wide(x)] for x in (source, node)]
    is_plain = target is not _aten.permute.default and equal_sizes(*shapes)
    return of._replace(axis=_wide(node)[_wide(source).index(of.axis)]) if is_plain else None


def _combined(target: Any, first: Line, other: Line) -> Line | None:
    """Return the line of an elementwise result."""
    like = first if first.step else other
    differ = first.step and other.step and first.axis != other.axis
    if differ or (like.step and target in _AND):
        return None
    start, end = (
        _ELEMENTWISE[target](first.first + first.step * i, other.first + other.step * i)
        for i in (0, 1)
    )
    line = like._replace(first=start, step=end - start)
    if target not in _COMPARISONS:
        return line if line == like else line._replace(base=None)
    # The signs of a difference: of the first, of the last, and those between.
    sign, last = ((x > 0) - (x < 0) for x in (start, line.step or start))
    results = {_COMPARISONS[target](x, 0) for x in range(min(sign, last), max(sign, last) + 1)}
    return Line(int(results.pop())) if len(results) == 1 else None


def _joined(parts: Sequence[Any], axis: int, facts: Mapping[Any, Any]) -> Line | None:
    """Return the line of a concatenated number and its continuation; None for other parts."""
    lines = [facts.get(part) for part in parts]
    match lines:
        case [Line(step=0) as head, Line() as line] if is_one(shape_of(parts[0])[axis]):
            step = line.step if line.axis == axis else 0
            is_plain = step == line.step and head.first + step == line.first
            return Line(head.first, step, axis) if is_plain else None
    return None


def range_of(node: Node) -> Line | None:
    """Return the ``Line`` of an ``arange`` with constant integers, or None."""
    args = arguments_of(node)
    first, step = args.get("start", 0), args.get("step", 1)
    is_plain = type(first) is type(step) is int and not isinstance(args["end"], float)
    return Line(first, step) if is_plain else None


def _wide(node: Any) -> list[int]:
    """Return the dimensions whose size is not 1."""
    shape = shape_of(node)
    return [dim for dim, size in enumerate(shape, -len(shape)) if not is_one(size)]


def _is_true(mask: Any, facts: Mapping[Any, Any]) -> bool:
    match facts.get(mask):
        case Line(first=1, step=0):
            return True
    return False


def _replace_by_view(node: Node, facts: dict[Node, Any]) -> bool:
    """Replace indexing with the positions of each dimension by a view; return whether it did."""
    args = arguments_of(node)
    source, indices = args["self"], args["indices"]
    rank = len(shape_of(node))
    sizes: list[Any] = [1] * rank
    axes, counts = [], []
    for index in indices:
        line = facts.get(index)
        if not isinstance(line, Line) or line.first:
            return False
        # A repeated constant would have to be expanded.
        if set(_wide(index)) - ({line.axis} if line.step else set()):
            return False
        counts.append(1)
        if line.step:
            if line.step != 1 or line.base.target not in ARANGE:
                return False
            # Indices of fewer dimensions are broadcast from the last.
            axes.append(line.axis + rank)
            counts[-1] = sizes[axes[-1]] = arguments_of(line.base)["end"]
    if axes != sorted(set(axes)) or len(counts) != len(shape_of(source)):
        return False
    for dim, count in enumerate(counts):
        if not equal_sizes([number_of(count)], shape_of(source)[dim : dim + 1]):
            source = insert_call(node, _aten.slice.Tensor, (source, dim, 0, count))
            facts[source] = infer_fact(source, facts)
    view = insert_call(node, _aten.view.default, (source, sizes))
    facts[view] = infer_fact(view, facts)
    node.replace_all_uses_with(view)
    return True


def insert_call(node: Node, target: Any, args: tuple[Any, ...], value: Any = None) -> Node:
    """Insert a call before ``node``, with its metadata, and return the call.

    Args:
        value: Fake result of the call; None to compute it.
    """
    with node.graph.inserting_before(node):
        call = node.graph.call_function(target, args)
    value = target(*map_arg(args, number_of)) if value is None else value
    call.meta = {**node.meta, "val": value}
    return call


def _without_repeats(mask: Any, facts: Mapping[Any, Any]) -> Any:
    """Return a smaller mask of equal rank that broadcasts to ``mask``, or ``mask`` itself."""
    if not isinstance(mask, Node):
        return mask
    inner: Any = None
    args: Any = mask.args
    line: Any = facts.get(mask)
    is_true = partial(_is_true, facts=facts)
    value, shape = mask.meta["val"], shape_of(mask)
    # With static sizes, a backend computes masks ahead of time.
    is_dynamic = any(map(varies, shape))
    if is_dynamic and isinstance(line, Line) and line.step and line.base not in (None, mask):
        args = (line.base, [-1 if dim == line.axis else 1 for dim in range(-len(shape), 0)])
        inner = insert_call(mask, _aten.view.default, args, _narrow(value, {line.axis}))
    elif mask.target is _aten.expand.default or _is_same(mask):
        inner = args[0]
    elif value.dtype is torch.bool and mask.target in _AND and any(map(is_true, args)):
        inner = args[1] if is_true(args[0]) else args[0]
    elif is_dynamic and mask.target in _ELEMENTWISE and not mask.kwargs:
        operands = tuple(_without_repeats(x, facts) for x in args)
        if operands != args:
            wide = {dim for x in operands if isinstance(x, Node) for dim in _wide(x)}
            inner = insert_call(mask, mask.target, operands, _narrow(value, wide))
    elif mask.target in _WHERE and is_true(args[0]):
        inner = args[1]
    if not isinstance(inner, Node) or len(shape_of(inner)) != len(shape_of(mask)):
        return mask
    if inner.meta["val"].dtype is not mask.meta["val"].dtype:
        return mask
    return _without_repeats(inner, facts)


def _narrow(value: torch.Tensor, wide: Container[int]) -> torch.Tensor:
    """Return a fake tensor with size 1 in all dimensions except ``wide``."""
    sizes = enumerate(value.shape, -value.dim())
    return new_fake(value, [size if dim in wide else 1 for dim, size in sizes])


def _is_same(node: Node) -> bool:
    source = node.args[0] if node.target in SAME_NUMBERS else None
    if not isinstance(source, Node):
        return False
    before, after = source.meta["val"], node.meta["val"]
    return before.dtype == after.dtype and equal_sizes(before.shape, after.shape)
