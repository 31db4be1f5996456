"""Layer, group, instance and batch normalisation by statistics of the call."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
from torch.types import IntLikeType as Dim

from lowerdeck.xnnpack.emit import Call, Emission, Tracked, is_fixed, is_one
from lowerdeck.xnnpack.operators.contract import Operator, Table
from lowerdeck.xnnpack.operators.first_result import (
    first_result,
    first_result_refusal,
)
from lowerdeck.xnnpack.payload.layout import Layout
from lowerdeck.xnnpack.payload.schema import KEEP_DIMS, NONE, NodeKind

_aten = torch.ops.aten
_PART = 16
"""The most numbers that one sum should add up. It is also the number of sums that a linear layer
computes in the time of one."""
_WIDE = 512
"""Wider rows are summed faster by pooling than by a linear layer."""
_TOKEN = 256
"""The widest rows that layer norms sum at once. Parts would take 1.5 % of the time of ViT-tiny;
they are more exact only for rows of few distinct numbers, or with one a million times others."""
_ELSEWHERE = 2.0**-64
"""Weight of a number in the sums of the other parts, too small to change them. With a weight of 0,
an infinity would make these sums NaN; with this weight they are infinite, as the row's sum is."""


def row_mean(
    emission: Emission,
    value: int,
    shape: Sequence[Dim],
    offset: float = 0.0,
    *,
    at_once: int = _PART,
) -> int:
    """Return the mean of ``value`` along its last dimension, which stays with size 1.

    The runtime has no such reduction; a linear layer with one row of 1/K computes it. It adds
    number by number, which is off by hundreds of units in the last place for rows of thousands:
    parts of a long row are summed first, which is about as exact as eager.

    Args:
        emission: Where to add.
        value: What to average, in the plain layout.
        shape: Its sizes; the last is a number.
        offset: What to add to the mean.
        at_once: The widest rows that are summed without parts.

    Returns:
        The id of the mean.
    """
    rows, width = shape[:-1], int(shape[-1])
    share = 1 / width
    # A reshape carries one symbolic size.
    can_pool = sum(not is_fixed(size) for size in rows) < 2
    while width > _PART and shape[-1] > at_once:
        if can_pool and width > _WIDE:
            value, width = _pooled_parts(emission, value, rows, width)
        else:
            value, width = _summed_parts(emission, value, rows, width)
        share *= _PART
    row, bias = torch.full((1, width), share), torch.tensor([offset]) if offset else None
    return _linear(emission, value, (*rows, 1), row, bias)


def _summed_parts(
    emission: Emission, value: int, rows: Sequence[Dim], width: int
) -> tuple[int, int]:
    """Return the sums of at most 16 parts of each row, divided by 16, and their number."""
    parts = min(_PART, math.ceil(width / _PART))
    part_of = torch.arange(width) * parts // width
    weights = torch.where(part_of == torch.arange(parts)[:, None], 1 / _PART, _ELSEWHERE)
    return _linear(emission, value, (*rows, parts), weights), parts


def _pooled_parts(
    emission: Emission, value: int, rows: Sequence[Dim], width: int
) -> tuple[int, int]:
    """Return the means of every 16 numbers of each row, and their number.

    Pooling takes a quarter of the time of a linear layer for rows of thousands, and no weights.
    """
    parts = math.ceil(width / _PART)
    missing = parts * _PART - width
    if missing:
        value = emission.add(
            NodeKind.STATIC_CONSTANT_PAD,
            (*rows, width + missing),
            pre_paddings=(0,) * (len(rows) + 1),
            post_paddings=(*(0,) * len(rows), missing),
            input_id=value,
        )
    count = math.prod(rows)
    value = emission.add(
        NodeKind.GLOBAL_AVG_POOLING_2D,
        (count, 1, 1, parts),
        input_id=emission.reshaped(value, (count, 1, _PART, parts)),
        flags=KEEP_DIMS,
    )
    return emission.reshaped(value, (*rows, parts)), parts


def _linear(
    emission: Emission,
    value: int,
    shape: Sequence[Dim],
    rows: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> int:
    return emission.add(
        NodeKind.FULLY_CONNECTED,
        shape,
        input1_id=value,
        filter_id=emission.constant_value(rows, packed=True),
        bias_id=NONE if bias is None else emission.constant_value(bias, packed=True),
    )


def shift_by_first(emission: Emission, tracked: Tracked, axes: Collection[int]) -> Tracked:
    """Return a tensor less its first element along some dimensions.

    The mean of equal numbers is not that number once it is rounded, and a norm divides the
    difference by the root of eps: a constant row of -100 came out as 0.29. Less its first element
    such a row is 0 throughout. Other rows lose nothing: the difference of close numbers is exact,
    and where one is far from the others, rounding it costs less than a unit in the last place of
    the largest result.

    Args:
        emission: Where to add.
        tracked: The tensor.
        axes: The dimensions over which a mean is to be taken.
    """
    layout, rank = tracked.preferred, len(tracked.shape)
    value = emission.id_of(tracked, layout)
    shape = tuple(1 if axis in axes else size for axis, size in enumerate(tracked.shape))
    # Size 0 stands for all of a dimension.
    sizes = [int(axis in axes) for axis in range(rank)]
    first = emission.add(
        NodeKind.STATIC_SLICE,
        shape,
        layout,
        num_dims=rank,
        offsets=(0,) * rank,
        sizes=layout.arrange(sizes),
        input_id=value,
    )
    shifted = emission.add(
        NodeKind.SUBTRACT, tracked.shape, layout, input1_id=value, input2_id=first
    )
    return emission.tracked(tracked.shape, shifted, layout)


def _standardized(
    emission: Emission,
    value: int,
    shape: Sequence[Dim],
    eps: float,
    *,
    at_once: int = _PART,
) -> int:
    """Return ``value`` with mean 0 and variance 1 along its last dimension."""

    def binary(kind: NodeKind, left: int, right: int) -> int:
        return emission.add(kind, shape, input1_id=left, input2_id=right)

    rows = emission.tracked(shape, value)
    shifted = emission.id_of(shift_by_first(emission, rows, {len(shape) - 1}))
    mean = row_mean(emission, shifted, shape, at_once=at_once)
    centred = binary(NodeKind.SUBTRACT, shifted, mean)
    squares = emission.add(NodeKind.SQUARE, shape, input_id=centred)
    variance = row_mean(emission, squares, shape, offset=eps, at_once=at_once)
    factor = emission.add(NodeKind.RECIPROCAL_SQUARE_ROOT, (*shape[:-1], 1), input_id=variance)
    return binary(NodeKind.MULTIPLY, centred, factor)


def _scaled_and_shifted(
    emission: Emission,
    value: int,
    shape: Sequence[Dim],
    scale: Tracked | None,
    shift: Tracked | None,
    layout: Layout = Layout.PLAIN,
) -> int:
    for kind, operand in ((NodeKind.MULTIPLY, scale), (NodeKind.ADD, shift)):
        if operand is not None:
            other = emission.id_of(operand, layout)
            value = emission.add(kind, shape, layout, input1_id=value, input2_id=other)
    return value


def _rms_norm(emission: Emission, call: Call) -> None:
    """Add ``x / sqrt(mean(x^2) + eps)``, over all folded dimensions as one."""
    args = call.args
    tracked = emission.of(args["input"])
    shape = tracked.shape
    kept = shape[: len(shape) - len(args["normalized_shape"])]
    flat = (*kept, math.prod(int(size) for size in shape[len(kept) :]))
    value = emission.id_of(tracked)
    if len(flat) < len(shape):
        value = emission.reshaped(value, flat)
    eps = args["eps"]
    if eps is None:  # Eager computes in float32, also where the input is float16.
        eps = torch.finfo(torch.float32).eps
    squares = emission.add(NodeKind.SQUARE, flat, input_id=value)
    mean = row_mean(emission, squares, flat, offset=float(eps))
    factor = emission.add(NodeKind.RECIPROCAL_SQUARE_ROOT, (*kept, 1), input_id=mean)
    value = emission.add(NodeKind.MULTIPLY, flat, input1_id=value, input2_id=factor)
    if len(flat) < len(shape):
        value = emission.reshaped(value, shape)
    weight = None if args["weight"] is None else emission.of(args["weight"])
    emission.define_value(call.node, _scaled_and_shifted(emission, value, shape, weight, None))


def _layer_norm(emission: Emission, call: Call) -> None:
    tracked = emission.of(call.args["input"])
    folded = len(call.args["normalized_shape"])
    shape = tracked.shape
    value = emission.id_of(tracked)
    if folded > 1:
        kept = shape[: len(shape) - folded]
        flat = (*kept, math.prod(int(size) for size in shape[len(kept) :]))
        value = _standardized(emission, emission.reshaped(value, flat), flat, call.args["eps"])
        value = emission.reshaped(value, shape)
    else:
        value = _standardized(emission, value, shape, call.args["eps"], at_once=_TOKEN)
    scale, shift = (
        None if call.args[name] is None else emission.of(call.args[name])
        for name in ("weight", "bias")
    )
    value = _scaled_and_shifted(emission, value, shape, scale, shift)
    emission.define_value(first_result(call.node), value)


def _group_norm(emission: Emission, call: Call) -> None:
    args = call.args
    tracked = emission.of(args["input"])
    groups = int(args["num_groups"] if "num_groups" in args else args["group"])
    if groups == 1 and len(tracked.shape) == 4 and tracked.preferred is Layout.CHANNELS_LAST:
        value = _standardized_images(emission, tracked, args["eps"])
        _define_channels_scaled(emission, call, value, tracked.preferred)
        return
    value = _standardized_groups(emission, tracked, groups, args["eps"])
    _define_channels_scaled(emission, call, value)


def _instance_norm(emission: Emission, call: Call) -> None:
    tracked = emission.of(call.args["input"])
    value = _standardized_groups(emission, tracked, int(tracked.shape[1]), call.args["eps"])
    _define_channels_scaled(emission, call, value)


def batch_statistics_norm(emission: Emission, call: Call) -> None:
    """Add a batch norm by the statistics of its input: each channel is one row.

    Args:
        emission: Where to add.
        call: The batch norm.
    """
    tracked = emission.of(call.args["input"])
    shape = tracked.shape
    if is_one(shape[0]):
        _instance_norm(emission, call)
        return
    order = [1, 0, *range(2, len(shape))]
    moved = [shape[axis] for axis in order]
    channels = emission.tracked(moved, emission.permuted(emission.id_of(tracked), order, moved))
    flat = (moved[0], math.prod(int(size) for size in moved[1:]))
    value = emission.reshaped(emission.id_of(channels), flat)
    value = _standardized(emission, value, flat, call.args["eps"])
    value = emission.permuted(emission.reshaped(value, moved), order, shape)
    _define_channels_scaled(emission, call, value)


def _standardized_groups(emission: Emission, tracked: Tracked, groups: int, eps: float) -> int:
    shape = tracked.shape
    flat = (shape[0], groups, math.prod(int(size) for size in shape[1:]) // groups)
    value = emission.reshaped(emission.id_of(tracked), flat)
    return emission.reshaped(_standardized(emission, value, flat, eps), shape)


def _define_channels_scaled(
    emission: Emission, call: Call, value: int, layout: Layout = Layout.PLAIN
) -> None:
    """Scale and shift each channel of a value, and say that it is a call's result."""
    shape = call.shape("input")
    sizes = (1, shape[1], *(1,) * (len(shape) - 2))
    scale, shift = (
        None
        if call.args[name] is None
        else Tracked(sizes, emission.constant(call.args[name]).reshape(sizes))
        for name in ("weight", "bias")
    )
    value = _scaled_and_shifted(emission, value, shape, scale, shift, layout)
    emission.define_value(first_result(call.node), value, layout)


def _standardized_images(emission: Emission, tracked: Tracked, eps: float) -> int:
    """Return images with mean 0 and variance 1 over all their channels, where they lie.

    Pooling over height and width and then over channels reads them as they are; one row of 1/K
    for a whole image would be as large as the image, and takes three times as long.
    """
    layout, shape = Layout.CHANNELS_LAST, tracked.shape
    pooled = (*shape[:2], 1, 1)

    def mean(value: int, offset: float = 0.0) -> int:
        columns = emission.add(
            NodeKind.GLOBAL_AVG_POOLING_2D, pooled, layout, input_id=value, flags=KEEP_DIMS
        )
        return row_mean(emission, columns, layout.arrange(pooled), offset)

    value = emission.id_of(shift_by_first(emission, tracked, {1, 2, 3}), layout)
    centred = emission.add(
        NodeKind.SUBTRACT, shape, layout, input1_id=value, input2_id=mean(value)
    )
    squares = emission.add(NodeKind.SQUARE, shape, layout, input_id=centred)
    factor = emission.add(
        NodeKind.RECIPROCAL_SQUARE_ROOT, (shape[0], 1, 1, 1), input_id=mean(squares, eps)
    )
    return emission.add(NodeKind.MULTIPLY, shape, layout, input1_id=centred, input2_id=factor)


def _layer_norm_refusal(call: Call) -> str | None:
    folded = len(call.args["normalized_shape"])
    shape = call.shape("input")
    if not all(is_fixed(size) for size in shape[len(shape) - folded :]):
        return "it normalises over a symbolic size"
    if folded > 1 and sum(not is_fixed(size) for size in shape) > 1:
        return "more than one symbolic size, which a reshape cannot carry"
    return first_result_refusal(call)


def _rms_norm_refusal(call: Call) -> str | None:
    eps = call.args["eps"]
    if eps is not None and not float(eps) > 0:
        return "its eps is not positive"
    return _layer_norm_refusal(call)


def _group_norm_refusal(call: Call) -> str | None:
    if not all(is_fixed(size) for size in call.shape("input")[1:]):
        return "it normalises over a symbolic size"
    if not call.is_constant("weight") or not call.is_constant("bias"):
        return "its weight or bias is not constant"
    return first_result_refusal(call)


def _instance_norm_refusal(call: Call) -> str | None:
    args = call.args
    if not args["use_input_stats"]:
        return "it normalises by fixed statistics"
    if args["running_mean"] is not None or args["running_var"] is not None:
        return "it updates statistics"
    return _group_norm_refusal(call)


def batch_statistics_refusal(call: Call) -> str | None:
    """Return why a batch norm by the statistics of its input is refused, or None."""
    if call.rank("input") < 2:
        return "it needs at least 2 dimensions"
    if not is_one(call.shape("input")[0]) and not is_fixed(call.shape("input")[0]):
        return "it normalises over a symbolic size"
    return _group_norm_refusal(call)


_LAYER_NORM = Operator(_layer_norm, _layer_norm_refusal, wide=True)
_GROUP_NORM = Operator(_group_norm, _group_norm_refusal, wide=True)
NORMALIZATION: Table = {
    _aten.layer_norm.default: _LAYER_NORM,
    _aten.native_layer_norm.default: _LAYER_NORM,
    _aten.rms_norm.default: Operator(_rms_norm, _rms_norm_refusal, wide=True),
    _aten.group_norm.default: _GROUP_NORM,
    _aten.native_group_norm.default: _GROUP_NORM,
    _aten.instance_norm.default: Operator(_instance_norm, _instance_norm_refusal, wide=True),
    _aten._native_batch_norm_legit.no_stats: Operator(
        batch_statistics_norm, batch_statistics_refusal, wide=True
    ),
}
