"""Means, sums and maxima over some of the dimensions."""

from __future__ import annotations

import math

import torch

from lowerdeck.xnnpack.emit.arguments import Call, is_fixed, shape_of
from lowerdeck.xnnpack.emit.emission import Emission, Tracked
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
    emission.define(call.node, _mean_of(emission, call, emission.of(call.args["self"])))


def _sum(emission: Emission, call: Call) -> None:
    mean = _mean_of(emission, call, emission.of(call.args["self"]))
    layout = mean.preferred
    value = emission.add(
        NodeKind.MULTIPLY,
        mean.shape,
        layout,
        input1_id=emission.id_of(mean, layout),
        input2_id=emission.id_of(emission.scalar(float(_count(call)))),
    )
    emission.define_value(call.node, value, layout)


def _mean_of(emission: Emission, call: Call, tracked: Tracked) -> Tracked:
    """Return the mean of a tensor over the dimensions that a call names."""
    shape, layout = shape_of(call.node), _pooling_layout(call, tracked)
    if layout is None:
        return emission.tracked(shape, _row_mean_of(emission, call, tracked))
    keep = bool(call.args.get("keepdim"))
    value = emission.add(
        NodeKind.GLOBAL_AVG_POOLING_2D,
        shape,
        layout if keep else Layout.PLAIN,
        input_id=emission.id_of(tracked, layout),
        flags=KEEP_DIMS if keep else 0,
    )
    return emission.tracked(shape, value, layout if keep else Layout.PLAIN)


def _pooling_layout(call: Call, tracked: Tracked) -> Layout | None:
    """Return the layout in which a call averages height and width, None where it does not."""
    if len(tracked.shape) != 4:
        return None
    axes = _axes(call)
    if axes == [2, 3]:
        return Layout.CHANNELS_LAST
    # In the plain layout these two lie where images have their height and width.
    return Layout.PLAIN if axes == [1, 2] and tracked.preferred is Layout.PLAIN else None


def _row_mean_of(emission: Emission, call: Call, tracked: Tracked) -> int:
    """Bring the averaged dimensions to the end, as one, and average along it."""
    axes = _axes(call)
    kept = [axis for axis in range(len(tracked.shape)) if axis not in axes]
    order = [*kept, *axes]
    moved = [tracked.shape[axis] for axis in order]
    value = emission.permuted(emission.id_of(tracked), order, moved)
    flat = (*moved[: len(kept)], _count(call))
    if len(axes) > 1:
        value = emission.reshaped(value, flat)
    return emission.reshaped(row_mean(emission, value, flat), shape_of(call.node))


def _count(call: Call) -> int:
    return math.prod(int(call.shape("self")[axis]) for axis in _axes(call))


def _vector_norm(emission: Emission, call: Call) -> None:
    """Add the root of a mean of squares, times the root of their number."""
    tracked = emission.of(call.args["self"])
    layout = tracked.preferred
    squares = emission.add(
        NodeKind.SQUARE, tracked.shape, layout, input_id=emission.id_of(tracked, layout)
    )
    mean = _mean_of(emission, call, emission.tracked(tracked.shape, squares, layout))
    shape, layout = mean.shape, mean.preferred
    root = emission.add(NodeKind.SQUARE_ROOT, shape, layout, input_id=emission.id_of(mean, layout))
    value = emission.add(
        NodeKind.MULTIPLY,
        shape,
        layout,
        input1_id=root,
        input2_id=emission.id_of(emission.scalar(math.sqrt(_count(call)))),
    )
    emission.define_value(call.node, value, layout)


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


def _vector_norm_refusal(call: Call) -> str | None:
    if call.args["ord"] != 2:
        return "only the norm of the order 2 is known"
    reason = _refusal(call)
    if reason is None and not all(is_fixed(call.shape("self")[axis]) for axis in _axes(call)):
        return "it reduces a symbolic size"
    return reason


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
    _aten.linalg_vector_norm.default: Operator(_vector_norm, _vector_norm_refusal, wide=True),
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
