"""Pass: subtract the mean before a normalization kernel.

The runtime's kernels compute a variance as the mean of the squares less the square of the mean.
This cancels catastrophically if the mean is large compared to the deviation: with a mean of 100
deviations a layer norm is off by 2e-3, with 1,000 by up to 0.5. Subtracting the mean first avoids
this and leaves the deviation unchanged.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from lowerdeck.emitter.ir.graph import Call, Method, Operation
from lowerdeck.emitter.ir.kernels import KernelTable
from lowerdeck.emitter.ir.values import ScalarValue, TensorValue, contiguous_order
from lowerdeck.emitter.passes.rewriting import by_target, rewrite
from lowerdeck.torch_base import OpOverload

_ATEN = torch.ops.aten
_NEEDED = tuple(f"aten::{name}.out" for name in ("mean", "sub", "add", "view_copy", "expand_copy"))
# Mean of a norm's input, broadcastable to the input, and the same in the shape of the mean that
# the norm returns.
Mean = tuple[TensorValue, TensorValue]


def center_norms(method: Method, table: KernelTable) -> None:
    """Subtract the mean from the input of layer, group and batch norms, and add it to their mean.

    Requires:
        Numbers of the program are computed.

    Ensures:
        The input of each norm has a mean of about zero over the normalized dimensions, unless
        the table has no kernels for it.
    """
    if table.names.issuperset(_NEEDED):
        rewrite(method, by_target(dict.fromkeys(_MEANS, _centered)))


def _centered(norm: Call, before: list[Operation]) -> list[Operation]:
    source, returned = norm.args[0], norm.outs[1]
    assert isinstance(returned, TensorValue)
    operations: list[Operation] = []
    shift, mean = _MEANS[norm.target](norm, operations)
    centered = source.like(f"{source.name}.centered")
    rest = returned.like(f"{returned.name}.rest")
    norm.args[0], norm.outs[1] = centered, rest
    before += [*operations, Call(_ATEN.sub.Tensor, [source, shift, 1], [centered], None)]
    return [
        norm,
        # Usually dead: models rarely read the mean.
        Call(_ATEN.add.Tensor, [rest, mean, 1], [returned], None),
    ]


def _layer_mean(norm: Call, before: list[Operation]) -> Mean:
    source, normalized = norm.args[0], len(norm.args[1])
    mean = _mean(source, range(source.rank - normalized, source.rank), before)
    return mean, mean


def _batch_mean(norm: Call, before: list[Operation]) -> Mean:
    source = norm.args[0]
    mean = _mean(source, [dim for dim in range(source.rank) if dim != 1], before)
    flat = [_fixed(channels) for channels in source.sizes[1:2]]
    return mean, _changed(_ATEN.view_copy.default, mean, flat, before)


def _group_mean(norm: Call, before: list[Operation]) -> Mean:
    view, expand = _ATEN.view_copy.default, _ATEN.expand_copy.default
    source, (batch, channels, area, groups) = norm.args[0], norm.args[3:7]
    rows = _Size(source.shape[0], source.sizes[0], batch)
    pixels = _Size(prod(source.shape[2:]), prod(source.sizes[2:]), area)
    all_channels = _Size(source.shape[1], source.sizes[1], channels)
    group, per_group, unit = _fixed(groups), _part(all_channels, groups, before), _fixed(1)
    grouped = _changed(view, source, [rows, group, per_group, pixels], before)
    mean = _mean(grouped, (2, 3), before)
    repeated = _changed(expand, mean, [rows, group, per_group, unit], before)
    ones = [unit] * (source.rank - 2)
    shift = _changed(view, repeated, [rows, all_channels, *ones], before)
    return shift, _changed(view, mean, [rows, group], before)


class _Size(NamedTuple):
    """A dimension: its size in the shape, its upper bound, and its IR value or number."""

    size: Any
    bound: int
    number: Any


def _fixed(size: int) -> _Size:
    return _Size(size, size, size)


def _part(whole: _Size, count: int, before: list[Operation]) -> _Size:
    """Return the size of each of ``count`` parts of a dimension."""
    number = whole.number
    if isinstance(number, ScalarValue):
        quotient = ScalarValue(f"{number.name}.each", int)
        before.append(Call(operator.floordiv, [number, count], [quotient], None))
        number = quotient
    else:
        number //= count
    return _Size(whole.size // count, whole.bound // count, number)


def _mean(source: TensorValue, dims: Iterable[int], before: list[Operation]) -> TensorValue:
    gone = list(dims)
    shape = tuple(1 if dim in gone else size for dim, size in enumerate(source.shape))
    sizes = tuple(1 if dim in gone else size for dim, size in enumerate(source.sizes))
    order = contiguous_order(source.rank)
    mean = TensorValue(f"{source.name}.mean", source.dtype, shape, sizes, order)
    before.append(Call(_ATEN.mean.dim, [source, gone, True, None], [mean], None))
    return mean


def _changed(
    target: OpOverload,
    value: TensorValue,
    shape: Sequence[_Size],
    before: list[Operation],
) -> TensorValue:
    """Return ``value`` in another shape, by a view or an expand."""
    changed = TensorValue(
        f"{value.name}.{len(before)}",
        value.dtype,
        tuple(size for size, _, _ in shape),
        tuple(bound for _, bound, _ in shape),
        contiguous_order(len(shape)),
    )
    arguments = [value, [number for _, _, number in shape]]
    arguments += [False] * (target is _ATEN.expand_copy.default)
    before.append(Call(target, arguments, [changed], None))
    return changed


_MEANS: dict[Any, Callable[[Call, list[Operation]], Mean]] = {
    _ATEN.native_layer_norm.default: _layer_mean,
    _ATEN.native_group_norm.default: _group_mean,
    _ATEN._native_batch_norm_legit.no_stats: _batch_mean,
}
