"""Known decompositions of calls with dynamic sizes.

They avoid traces, which are slow because of symbolic guards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import Node

from lowerdeck.decompose._torch_private import DROPOUT_COPIES
from lowerdeck.decompose.calls.facts import TensorFacts, contiguous_strides
from lowerdeck.decompose.rules import Rules
from lowerdeck.decompose.untraced import CONVOLUTION, NORM, convolution, norm
from lowerdeck.torch_base import OpOverload, core_decompositions, expression_of, hint_of, varies

_ATEN = torch.ops.aten
_RESHAPES = frozenset({_ATEN.reshape.default, _ATEN.flatten.using_ints, _ATEN.contiguous.default})
_CONVOLUTIONS = frozenset({_ATEN.conv1d.default, _ATEN.conv2d.default, _ATEN.conv3d.default})
_CASTS: Mapping[Any, tuple[str, ...]] = MappingProxyType(
    {_ATEN.to.dtype: ("dtype",), _ATEN.to.device: ("device", "dtype"), _ATEN.to.dtype_layout: ()}
)
_FILL = _ATEN.fill.Tensor
_RENAMED: Mapping[Any, Any] = MappingProxyType(
    {
        _ATEN.__and__.Tensor: _ATEN.bitwise_and.Tensor,
        _FILL: _ATEN.copy.default,
        _ATEN.multiply.Tensor: _ATEN.mul.Tensor,
    }
)
FILLED = frozenset({_ATEN.masked_fill.Scalar, _ATEN.where.ScalarOther})
"""Operators that become ``where`` with a number."""
RANGE, ZEROS = _ATEN.arange.default, _ATEN.new_zeros.default
"""Become ``arange.start_step`` and ``full`` with the options of all factories."""
FRESH = frozenset(
    {_ATEN.batch_norm.default, _ATEN.pad.default, RANGE, ZEROS, *_CONVOLUTIONS, *_RENAMED, *FILLED}
)
"""Operators whose result is never an alias."""
KNOWN = FRESH | _RESHAPES | _CASTS.keys() | {_ATEN.transpose.int, _ATEN.dropout.default}
"""Operators that become a copy and a view, or few calls of other operators."""
_printed: Callable[[Any], str] = cache(str)
_CONTIGUOUS: Mapping[str, Any] = MappingProxyType({"memory_format": torch.contiguous_format})

Step = tuple[Any, tuple[Any, ...], Mapping[str, Any], TensorFacts | tuple[TensorFacts, ...] | None]
"""Operator, arguments after the tensor, keyword arguments, and the result if not as recorded.

If there are several results, the next step reads the first.
"""


def known_operators(rules: Rules) -> frozenset[OpOverload]:
    """Return the ``KNOWN`` operators that ``rules`` decompose as torch does by default."""
    default = core_decompositions()
    return frozenset(
        operator
        for operator in KNOWN
        if operator not in rules.composites and rules.others.get(operator) is default.get(operator)
    )


def known_steps(
    node: Node, args: Sequence[Any], before: TensorFacts, symbol: Callable[[Any], Any]
) -> list[Step] | None:
    """Return a chain of calls that replaces a call.

    Args:
        node: Original call of a ``KNOWN`` operator.
        args: Arguments after the tensor, in the new graph.
        before: Facts of the tensor.
        symbol: Returns the new node of a symbol, or None.

    Returns:
        The calls, empty for a no-op; None if a trace is needed.
    """
    after = TensorFacts.of(node.meta["val"])
    if node.target is _ATEN.dropout.default:
        if args[1]:
            return None
        return [(_ATEN.clone.default, (), {}, None)] if DROPOUT_COPIES else []
    if node.target in _CONVOLUTIONS:
        arguments = None if node.kwargs else convolution(len(before.shape), *args)
        return None if arguments is None else [(CONVOLUTION, arguments, {}, None)]
    if node.target is _ATEN.batch_norm.default:
        arguments = None if node.kwargs else norm(node, *args)
        statistics = replace(after, shape=(0,), stride=(1,))
        results = (after, statistics, statistics)
        return None if arguments is None else [(NORM, arguments[1:], {}, results)]
    if node.target in _RENAMED:
        # torch's ``copy`` returns the strides of what it overwrites.
        like = replace(after, stride=before.stride) if node.target is _FILL else None
        return None if node.kwargs else [(_RENAMED[node.target], tuple(args), {}, like)]
    if node.target is _ATEN.pad.default:
        is_plain = len(args) == 1 and not node.kwargs
        return [(_ATEN.constant_pad_nd.default, (args[0], 0.0), {}, None)] if is_plain else None
    if node.target in _CASTS:
        return _cast(node, args, before, after)
    if node.target is _ATEN.transpose.int:
        order = list(range(len(before.shape)))
        first, second = (order[axis] if order else 0 for axis in args)
        if first == second:
            return None
        order[first], order[second] = second, first
        return [(_ATEN.permute.default, (order,), {}, None)]
    was_contiguous = _is_contiguous(before)
    # Views of non-contiguous tensors are never contiguous, copies are, whatever their strides say.
    is_contiguous = _is_contiguous(after, by_hint=was_contiguous is False)
    if None in (is_contiguous, was_contiguous):
        return None
    steps: list[Step] = []
    if is_contiguous and not was_contiguous:
        copied = replace(before, stride=contiguous_strides(before.shape))
        steps.append((_ATEN.clone.default, (), _CONTIGUOUS, copied))
    if node.target is _ATEN.contiguous.default:
        return None if args or node.kwargs else steps
    sizes = args[0] if node.target is _ATEN.reshape.default else _sizes(after.shape, symbol)
    # As torch's retrace, without ``Min``.
    strides = map(expression_of, after.stride)
    is_plain = not is_contiguous or not any("Min(" in _printed(stride) for stride in strides)
    result = None if is_plain else replace(after, stride=contiguous_strides(after.shape))
    return None if sizes is None else [*steps, (_ATEN.view.default, (sizes,), {}, result)]


def _cast(
    node: Node, args: Sequence[Any], before: TensorFacts, after: TensorFacts
) -> list[Step] | None:
    names = _CASTS[node.target]
    options = {**dict(zip(names, args, strict=False)), **node.kwargs}
    is_plain = len(args) == len(names) and options.keys() <= {"dtype", "device", "layout"}
    if not is_plain or before.device != after.device:
        return None
    return [] if before.dtype == after.dtype else [(_ATEN._to_copy.default, (), options, None)]


def _sizes(shape: Sequence[Any], symbol: Callable[[Any], Any]) -> list[Any] | None:
    """Return sizes for a view with at most one inferred size, or None if more are unknown."""
    nodes = [symbol(size) if varies(size) else size for size in shape]
    return [-1 if size is None else size for size in nodes] if nodes.count(None) < 2 else None


def _is_contiguous(facts: TensorFacts, *, by_hint: bool = False) -> bool | None:
    """Return whether a tensor is contiguous, or None if that needs a guard.

    Args:
        by_hint: Whether to decide by the example sizes if a guard would be needed.
    """
    if facts.is_contiguous:
        return True
    strides = zip(facts.shape, facts.stride, contiguous_strides(facts.shape), strict=True)
    # The stride of a dimension of size 1 may be any number.
    hints = [(hint_of(a), hint_of(b)) for size, a, b in strides if varies(size) or size != 1]
    if None in chain.from_iterable(hints):
        return None
    return False if any(old != new for old, new in hints) else by_hint or None
