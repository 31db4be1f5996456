"""Known decompositions of calls with dynamic sizes.

They save traces, which take 20 to 100 ms, mostly for symbolic guards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import Node

from lowerdeck.decompose.calls.facts import TensorFacts, facts_key
from lowerdeck.decompose.rules import Rules
from lowerdeck.decompose.untraced import CONVOLUTION, NORM, convolution, norm
from lowerdeck.torch_base import core_decompositions, hint_of, varies

_ATEN = torch.ops.aten
_RESHAPES = frozenset({_ATEN.reshape.default, _ATEN.flatten.using_ints, _ATEN.contiguous.default})
_CONVOLUTIONS = frozenset({_ATEN.conv1d.default, _ATEN.conv2d.default, _ATEN.conv3d.default})
_OTHERS = frozenset({_ATEN.transpose.int, _ATEN.dropout.default, _ATEN.batch_norm.default})
KNOWN = _RESHAPES | _CONVOLUTIONS | _OTHERS
"""Operators that become a copy and a view, or one call of another operator."""
_CONTIGUOUS: Mapping[str, Any] = MappingProxyType({"memory_format": torch.contiguous_format})

Step = tuple[Any, tuple[Any, ...], Mapping[str, Any], TensorFacts | tuple[TensorFacts, ...] | None]
"""Operator, arguments after the tensor, keyword arguments, and result unless as recorded.

If there are several results, the next step reads the first.
"""


def has_known_parts(rules: Rules) -> bool:
    """Return whether ``rules`` decompose ``KNOWN`` operators as torch does by default."""
    parts = (_ATEN.view.default, _ATEN.permute.default, _ATEN.clone.default, CONVOLUTION, NORM)
    default = core_decompositions()
    return all(map(rules.leaves, parts)) and all(
        operator not in rules.composites and rules.others.get(operator) is default.get(operator)
        for operator in KNOWN
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
        return None if args[1] else [(_ATEN.clone.default, (), {}, None)]
    if node.target in _CONVOLUTIONS:
        arguments = None if node.kwargs else convolution(len(before.shape), *args)
        return None if arguments is None else [(CONVOLUTION, arguments, {}, None)]
    if node.target is _ATEN.batch_norm.default:
        arguments = None if node.kwargs else norm(node, *args)
        statistics = replace(after, shape=(0,), stride=(1,))
        results = (after, statistics, statistics)
        return None if arguments is None else [(NORM, arguments[1:], {}, results)]
    if node.target is _ATEN.transpose.int:
        order = list(range(len(before.shape)))
        first, second = (order[axis] if order else 0 for axis in args)
        if first == second:
            return None
        order[first], order[second] = second, first
        return [(_ATEN.permute.default, (order,), {}, None)]
    is_contiguous, was_contiguous = _is_contiguous(after), _is_contiguous(before)
    if None in (is_contiguous, was_contiguous):
        return None
    steps: list[Step] = []
    if is_contiguous and not was_contiguous:
        # Views of non-contiguous tensors are never contiguous.
        copied = replace(before, stride=_strides(before.shape))
        steps.append((_ATEN.clone.default, (), _CONTIGUOUS, copied))
    if node.target is _ATEN.contiguous.default:
        return None if args or node.kwargs else steps
    sizes = args[0] if node.target is _ATEN.reshape.default else _sizes(after.shape, symbol)
    return None if sizes is None else [*steps, (_ATEN.view.default, (sizes,), {}, None)]


def _sizes(shape: Sequence[Any], symbol: Callable[[Any], Any]) -> list[Any] | None:
    """Return sizes for a view with at most one inferred size, or None if more are unknown."""
    nodes = [symbol(size) if varies(size) else size for size in shape]
    return [-1 if size is None else size for size in nodes] if nodes.count(None) < 2 else None


def _is_contiguous(facts: TensorFacts) -> bool | None:
    """Return whether a tensor is contiguous, or None if that needs a guard."""
    expected = _strides(facts.shape)
    if facts_key(replace(facts, stride=expected)) == facts_key(facts):
        return True
    hints = [(hint_of(old), hint_of(new)) for old, new in zip(facts.stride, expected, strict=True)]
    differs = any(old != new for old, new in hints)
    return False if differs and None not in chain.from_iterable(hints) else None


def _strides(shape: Sequence[Any]) -> tuple[Any, ...]:
    strides: list[Any] = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides)) if shape else ()
