"""How the kernels of some operators lay their results in memory, where fake tensors say otherwise.

What comes after them was told by the fake strides: ``reshape`` becomes a ``view`` that the real
tensor refuses, so that torch's decomposed program fails when it is run.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from lowerdeck.decompose._torch_private import fake_tensor, relaid
from lowerdeck.decompose.calls.facts import number_key
from lowerdeck.decompose.calls.strides import dense_order
from lowerdeck.torch_base import SYMBOLS, FakeTensor

_ATEN = torch.ops.aten

_CHANNELS_LAST = MappingProxyType({4: (0, 2, 3, 1), 5: (0, 2, 3, 4, 1)})


def told_by_kernels(
    rules: Mapping[Any, Callable[..., Any]],
) -> Mapping[Any, Callable[..., Any]]:
    """Return rules by which results lie, while they are recorded, as they will in the run.

    Args:
        rules: How operators are taken apart.
    """
    laying = {operator: _Laying(operator, rules.get(operator)) for operator in _LAID}
    return ChainMap(laying, rules)  # type: ignore[arg-type]  # It is only read.


class _Laying:
    """Keeps an operator whole that no rule takes apart, and lets its result lie as it will."""

    def __init__(self, operator: Any, rule: Callable[..., Any] | None) -> None:
        self._operator, self._rule = operator, rule
        self._is_called = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_called:
            return NotImplemented
        made = NotImplemented if self._rule is None else self._rule(*args, **kwargs)
        if made is not NotImplemented:
            return made
        self._is_called = True
        try:
            made = self._operator(*args, **kwargs)
        finally:
            self._is_called = False
        return relaid(made, lambda first: as_run(self._operator, first, args))


def as_run(target: Any, value: FakeTensor, args: Sequence[Any]) -> FakeTensor:
    """Return what an operator gives, lying as its kernel lays it.

    Args:
        target: The operator.
        value: Its first result, as fake tensors have it.
        args: What it was given.
    """
    laid = _LAID.get(target)
    if laid is None:
        return value
    strides = laid(value, args)
    if strides is None or [*map(number_key, strides)] == [*map(number_key, value.stride())]:
        return value
    return fake_tensor(value.fake_mode, value.shape, strides, value.dtype, value.device)


def _one_by_one(value: FakeTensor, _: Sequence[Any]) -> Sequence[Any]:
    """The strides of rows after rows."""
    sizes = [1 if number_key(size) == 0 else size for size in value.shape]
    return [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]


def _normed(value: FakeTensor, args: Sequence[Any]) -> Sequence[Any] | None:
    """Norms of batches keep channels last, and no other order of dimensions, on processors."""
    if value.device.type != "cpu":
        return None
    order = dense_order(value)
    if order is None:
        return None
    long = [dim for dim in order if number_key(value.shape[dim]) != 1]
    last = [dim for dim in _CHANNELS_LAST.get(value.dim(), ()) if dim in long]
    return None if long in (sorted(long), last) else _one_by_one(value, args)


def _convolved(value: FakeTensor, args: Sequence[Any]) -> Sequence[Any] | None:
    """What cuDNN gives, which torch does not ask while it traces."""
    order = _CHANNELS_LAST.get(value.dim())
    if value.device.type != "cuda" or order is None or not any(map(_lies_last, args[:2])):
        return None
    steps: dict[int, Any] = {}
    for dim in reversed(order):
        steps[dim] = math.prod([value.shape[other] for other in steps])
    return [steps[dim] for dim in range(value.dim())]


def _lies_last(given: torch.Tensor) -> bool:
    """Return whether cuDNN takes a tensor for one whose channels are last."""
    step: Any = 0
    for dim in (1, *reversed(_CHANNELS_LAST[given.dim()][1:-1]), 0):
        size, stride = given.shape[dim], given.stride(dim)
        if isinstance(size, SYMBOLS) or isinstance(stride, SYMBOLS):
            # Of what is static, at least the channels and what lies within a row.
            return dim != 1 and given.stride(1) == 1
        if size == 0 or stride < step or (dim == 0 and step == given.stride(1)):
            return False
        step = stride * max(size, 1)
    return True


def _iterated(_: FakeTensor, args: Sequence[Any]) -> Sequence[Any] | None:
    """What most operators do with two tensors that lie differently; torch has it from ``add``."""
    given = [arg for arg in args if isinstance(arg, torch.Tensor)]
    numbers = [number for each in given for number in (*each.shape, *each.stride())]
    if len(given) != 2 or any(isinstance(number, SYMBOLS) for number in numbers):
        return None
    one, other = (torch.empty_strided(each.shape, each.stride(), device="meta") for each in given)
    return torch.add(one, other).stride()


_LAID: Mapping[Any, Callable[[FakeTensor, Sequence[Any]], Sequence[Any] | None]]
_LAID = MappingProxyType(
    {
        _ATEN.convolution.default: _convolved,
        _ATEN.native_batch_norm.default: _normed,
        _ATEN._native_batch_norm_legit.no_stats: _normed,
        _ATEN._native_batch_norm_legit_functional.default: _normed,
        _ATEN._native_batch_norm_legit_no_training.default: _normed,
        _ATEN._batch_norm_no_update.default: _normed,
        _ATEN._batch_norm_with_update_functional.default: _normed,
        _ATEN.pow.Scalar: _one_by_one,
        _ATEN.copysign.Tensor: _iterated,
        _ATEN.div.Tensor_mode: _iterated,
        _ATEN.logical_and.default: _iterated,
        _ATEN.logical_or.default: _iterated,
        _ATEN.logical_xor.default: _iterated,
    }
)
"""Found by running all operators that have samples, on tensors that lie in many ways."""
