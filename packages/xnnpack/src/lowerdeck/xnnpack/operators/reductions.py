"""Means, sums and maxima over some of the dimensions."""

from __future__ import annotations

import math

import torch

from lowerdeck.xnnpack.emit.arguments import Call, is_fixed, shape_of
from lowerdeck.xnnpack.emit.emission import Emission
from lowerdeck.xnnpack.operators.contract import Integers, Operator, Table
from lowerdeck.xnnpack.operators.first_result import (
    first_result,
    first_result_refusal,
)
from lowerdeck.xnnpack.operators.normalization import row_mean
from lowerdeck.xnnpack.payload.layout import Layout
from lowerdeck.xnnpack.payload.schema import KEEP_DIMS, NodeKind

_aten = torch.ops.aten


def _axes(call: Call) -> list[int]:
    rank = call.rank("self")
    given = call.args.get("dim")
    if isinstance(given, int):
        return [given % rank]
    return sorted({int(axis) % rank for axis in (given or range(rank))})


def _mean(emission: Emission, call: Call) -> None:
    tracked = emission.of(call.args["self"])
    if len(tracked.shape) == 4 and _axes(call) == [2, 3]:
        keep = bool(call.args.get("keepdim"))
        value = emission.add(
            NodeKind.GLOBAL_AVG_POOLING_2D,
            shape_of(call.node),
            Layout.CHANNELS_LAST,
            input_id=emission.id_of(tracked, Layout.CHANNELS_LAST),
            flags=KEEP_DIMS if keep else 0,
        )
        emission.define_value(call.node, value, Layout.CHANNELS_LAST if keep else Layout.PLAIN)
        return
    _reduce(emission, call, total=False)


def _sum(emission: Emission, call: Call) -> None:
    _reduce(emission, call, total=True)


def _reduce(emission: Emission, call: Call, *, total: bool) -> None:
    """Bring the reduced dimensions to the end, as one, and average along it."""
    tracked = emission.of(call.args["self"])
    axes = _axes(call)
    kept = [axis for axis in range(len(tracked.shape)) if axis not in axes]
    order = [*kept, *axes]
    moved = [tracked.shape[axis] for axis in order]
    value = emission.permuted(emission.id_of(tracked), order, moved)
    count = math.prod(int(tracked.shape[axis]) for axis in axes)
    flat = (*moved[: len(kept)], count)
    if len(axes) > 1:
        value = emission.reshaped(value, flat)
    value = row_mean(emission, value, flat)
    if total:
        value = emission.add(
            NodeKind.MULTIPLY,
            (*flat[:-1], 1),
            input1_id=value,
            input2_id=emission.id_of(emission.scalar(float(count))),
        )
    emission.define_value(call.node, emission.reshaped(value, shape_of(call.node)))


def _refusal(call: Call) -> str | None:
    if call.args["dtype"] not in (None, torch.float32, call.args["self"].meta["val"].dtype):
        return "it changes the dtype"
    shape = call.shape("self")
    if not shape:
        return "it has no dimension"
    axes = _axes(call)
    if call.node.target in _MEANS and len(shape) == 4 and axes == [2, 3]:
        return None
    if not all(is_fixed(shape[axis]) for axis in axes):
        return "it reduces a symbolic size"
    if sum(not is_fixed(size) for size in shape) > 1:
        return "more than one symbolic size, which a reshape cannot carry"
    return None


def _maximum(emission: Emission, call: Call) -> None:
    tracked = emission.of(call.args["self"])
    axes = _axes(call)
    kernel = [int(tracked.shape[axis]) if axis in axes else 1 for axis in (2, 3)]
    keep = bool(call.args["keepdim"])
    result = first_result(call.node)
    shape = shape_of(result)
    pooled = [1 if axis in axes else size for axis, size in enumerate(tracked.shape)]
    value = emission.add(
        NodeKind.MAX_POOLING_2D,
        pooled,
        Layout.CHANNELS_LAST,
        pooling_height=kernel[0],
        pooling_width=kernel[1],
        stride_height=1,
        stride_width=1,
        dilation_height=1,
        dilation_width=1,
        input_id=emission.id_of(tracked, Layout.CHANNELS_LAST),
    )
    whole = emission.tracked(pooled, value, Layout.CHANNELS_LAST)
    if keep:
        emission.define(result, whole)
        return
    emission.define_value(result, emission.reshaped(emission.id_of(whole), shape))


def _maximum_refusal(call: Call) -> str | None:
    shape = call.shape("self")
    if len(shape) != 4 or not set(_axes(call)) <= {2, 3}:
        return "only maxima over the height and width of images are known"
    if not all(is_fixed(shape[axis]) for axis in _axes(call)):
        return "it reduces a symbolic size"
    if not call.args["keepdim"] and sum(not is_fixed(size) for size in shape) > 1:
        return "more than one symbolic size, which a reshape cannot carry"
    return first_result_refusal(call)


def _mean_int8_refusal(call: Call) -> str | None:
    if call.rank("self") != 4 or _axes(call) != [2, 3]:
        return "XNNPACK averages integers over whole images only"
    return None


_MAXIMUM = Operator(_maximum, _maximum_refusal, integers=Integers.KEEPS)
_MEANS = {_aten.mean.dim, _aten.mean.default}
REDUCTIONS: Table = {
    _aten.amax.default: _MAXIMUM,
    _aten.max.dim: _MAXIMUM,
    **dict.fromkeys(
        _MEANS,
        Operator(
            _mean,
            _refusal,
            integers=Integers.CHOOSES,
            int8_refusal=_mean_int8_refusal,
            wide=True,
        ),
    ),
    **dict.fromkeys(
        [_aten.sum.dim_IntList, _aten.sum.default], Operator(_sum, _refusal, wide=True)
    ),
}
