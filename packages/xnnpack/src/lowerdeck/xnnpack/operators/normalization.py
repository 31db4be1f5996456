"""Layer, group, instance and batch normalisation by statistics of the call."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch.types import IntLikeType as Dim

from lowerdeck.serializer import XnnEncoding, XnnOperator
from lowerdeck.xnnpack.emit import (
    Call,
    Emission,
    Tracked,
    is_fixed,
    is_one,
    resized,
    symbols_refusal,
)
from lowerdeck.xnnpack.operators.contract import Operator, Table
from lowerdeck.xnnpack.operators.first_result import (
    first_result,
    first_result_refusal,
)
from lowerdeck.xnnpack.operators.images import image_sizes, mean_of_images, padded
from lowerdeck.xnnpack.payload.layout import Layout

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
    emission: Emission, tensor: Tracked, offset: float = 0.0, *, at_once: int = _PART
) -> Tracked:
    """Return the mean of a tensor along its last dimension, which stays with size 1.

    The runtime has no such reduction; a linear layer with one row of 1/K computes it. It adds
    number by number, which is off by hundreds of units in the last place for rows of thousands:
    parts of a long row are summed first, which is about as exact as eager.

    Args:
        emission: Where to add.
        tensor: What to average, in the plain layout; its last size is a number.
        offset: What to add to the mean.
        at_once: The widest rows that are summed without parts.
    """
    *rows, width = tensor.shape
    in_parts, share = width > at_once, 1 / int(width)
    can_pool = symbols_refusal(rows) is None
    while in_parts and tensor.shape[-1] > _PART:
        parts = _pooled_parts if can_pool and tensor.shape[-1] > _WIDE else _summed_parts
        tensor = parts(emission, tensor)
        share *= _PART
    row = torch.full((1, int(tensor.shape[-1])), share)
    return weighted_sums(emission, tensor, row, torch.tensor([offset]) if offset else None)


def _summed_parts(emission: Emission, tensor: Tracked) -> Tracked:
    """Return the sums of at most 16 parts of each row, divided by 16."""
    width = int(tensor.shape[-1])
    parts = min(_PART, math.ceil(width / _PART))
    part_of = torch.arange(width) * parts // width
    weights = torch.where(part_of == torch.arange(parts)[:, None], 1 / _PART, _ELSEWHERE)
    return weighted_sums(emission, tensor, weights)


def _pooled_parts(emission: Emission, tensor: Tracked) -> Tracked:
    """Return the means of every 16 numbers of each row.

    Pooling takes a quarter of the time of a linear layer for rows of thousands, and no weights.
    """
    *rows, width = tensor.shape
    parts = math.ceil(int(width) / _PART)
    value, missing = emission.id_of(tensor), parts * _PART - int(width)
    if missing:
        none = (0,) * len(rows)
        shape = (*rows, parts * _PART)
        value = padded(emission, value, shape, (*none, 0), (*none, missing))
    count = math.prod(rows)
    value = emission.reshaped(value, (count, 1, _PART, parts))
    value = mean_of_images(emission, value, (count, 1, 1, parts))
    shape = (*rows, parts)
    return emission.tracked(shape, emission.reshaped(value, shape))


def weighted_sums(
    emission: Emission,
    tensor: Tracked,
    weights: torch.Tensor,
    bias: torch.Tensor | None = None,
    encoding: XnnEncoding | None = None,
) -> Tracked:
    """Return a linear layer of a tensor.

    Args:
        emission: Where to add.
        tensor: The tensor.
        weights: Constants, one row for each result.
        bias: What is added to each result.
        encoding: How the weights are stored; as results are, by default.
    """
    shape = (*tensor.shape[:-1], len(weights))
    value = emission.add(
        XnnOperator.FULLY_CONNECTED,
        shape,
        input1_id=emission.id_of(tensor),
        filter_id=emission.packed(weights, encoding),
        bias_id=emission.packed(bias),
    )
    return emission.tracked(shape, value)


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
        XnnOperator.STATIC_SLICE,
        shape,
        layout,
        num_dims=rank,
        offsets=(0,) * rank,
        sizes=layout.arrange(sizes),
        input_id=value,
    )
    return emission.binary(XnnOperator.SUBTRACT, tracked, emission.tracked(shape, first, layout))


def _standardized(
    emission: Emission, rows: Tracked, eps: float, *, at_once: int = _PART
) -> Tracked:
    """Return a tensor in the plain layout with mean 0 and variance 1 along its last dimension."""
    shifted = shift_by_first(emission, rows, {len(rows.shape) - 1})
    mean = row_mean(emission, shifted, at_once=at_once)
    centred = emission.binary(XnnOperator.SUBTRACT, shifted, mean)
    squares = emission.unary(XnnOperator.SQUARE, centred)
    variance = row_mean(emission, squares, eps, at_once=at_once)
    factor = emission.unary(XnnOperator.RECIPROCAL_SQUARE_ROOT, variance)
    return emission.binary(XnnOperator.MULTIPLY, centred, factor)


def _scaled_and_shifted(
    emission: Emission, tensor: Tracked, scale: Tracked | None, shift: Tracked | None
) -> Tracked:
    for kind, operand in ((XnnOperator.MULTIPLY, scale), (XnnOperator.ADD, shift)):
        if operand is not None:
            tensor = emission.binary(kind, tensor, operand, shape=tensor.shape)
    return tensor


def _operands(emission: Emission, call: Call, *names: str) -> list[Tracked | None]:
    """Return what is known of arguments, None for those that are None."""
    args = [call.args[name] for name in names]
    return [None if one is None else emission.of(one) for one in args]


def _folded(tracked: Tracked, folded: int) -> tuple[Dim, ...]:
    """Return the sizes of a tensor whose last dimensions are one."""
    kept = tracked.shape[: len(tracked.shape) - folded]
    return (*kept, math.prod(int(size) for size in tracked.shape[len(kept) :]))


def _rms_norm(emission: Emission, call: Call) -> None:
    """Add ``x / sqrt(mean(x^2) + eps)``, over all folded dimensions as one."""
    tracked, folded = emission.of(call.args["input"]), len(call.args["normalized_shape"])
    rows = emission.plain(tracked)
    if folded > 1:
        rows = emission.view(rows, _folded(tracked, folded))
    eps = call.args["eps"]
    if eps is None:  # Eager computes in float32, also where the input is float16.
        eps = torch.finfo(torch.float32).eps
    mean = row_mean(emission, emission.unary(XnnOperator.SQUARE, rows), float(eps))
    factor = emission.unary(XnnOperator.RECIPROCAL_SQUARE_ROOT, mean)
    result = emission.binary(XnnOperator.MULTIPLY, rows, factor)
    if folded > 1:
        result = emission.view(result, tracked.shape)
    (weight,) = _operands(emission, call, "weight")
    emission.define(call.node, _scaled_and_shifted(emission, result, weight, None))


def _layer_norm(emission: Emission, call: Call) -> None:
    tracked, folded = emission.of(call.args["input"]), len(call.args["normalized_shape"])
    rows = emission.plain(tracked)
    if folded > 1:
        rows = emission.view(rows, _folded(tracked, folded))
        result = _standardized(emission, rows, call.args["eps"])
        result = emission.view(result, tracked.shape)
    else:
        result = _standardized(emission, rows, call.args["eps"], at_once=_TOKEN)
    result = _scaled_and_shifted(emission, result, *_operands(emission, call, "weight", "bias"))
    emission.define(first_result(call.node), result)


def _group_norm(emission: Emission, call: Call) -> None:
    args = call.args
    tracked = emission.of(args["input"])
    groups = _groups_of(call)
    if not all(map(is_fixed, tracked.shape[2:])):
        # Lines of several dynamic sizes become images without a reshape.
        image = resized(emission, tracked, image_sizes(tracked.shape))
        result = _standardized_by_channels(emission, image, groups, args["eps"])
        result = resized(emission, result, tracked.shape)
    elif groups == 1 and len(tracked.shape) == 4 and tracked.preferred is Layout.CHANNELS_LAST:
        result = _standardized_images(emission, tracked, args["eps"])
    else:
        result = _standardized_groups(emission, tracked, groups, args["eps"])
    _define_channels_scaled(emission, call, result)


def _groups_of(call: Call) -> int:
    args = call.args
    return int(args["num_groups"] if "num_groups" in args else args["group"])


def _instance_norm(emission: Emission, call: Call) -> None:
    tracked = emission.of(call.args["input"])
    result = _standardized_groups(emission, tracked, int(tracked.shape[1]), call.args["eps"])
    _define_channels_scaled(emission, call, result)


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
    moved = emission.transposed(tracked, order)
    flat = (shape[1], math.prod(int(size) for size in moved.shape[1:]))
    result = _standardized(emission, emission.view(moved, flat), call.args["eps"])
    result = emission.transposed(emission.view(result, moved.shape), order)
    _define_channels_scaled(emission, call, result)


def _standardized_groups(emission: Emission, tracked: Tracked, groups: int, eps: float) -> Tracked:
    shape = tracked.shape
    flat = (shape[0], groups, math.prod(int(size) for size in shape[1:]) // groups)
    return emission.view(_standardized(emission, emission.view(tracked, flat), eps), shape)


def _define_channels_scaled(emission: Emission, call: Call, result: Tracked) -> None:
    """Scale and shift each channel of a tensor, and define it as a call's result."""
    sizes = (1, result.shape[1], *(1,) * (len(result.shape) - 2))
    operands = [
        None
        if call.args[name] is None
        else Tracked(sizes, emission.constant(call.args[name]).reshape(sizes))
        for name in ("weight", "bias")
    ]
    result = _scaled_and_shifted(emission, result, *operands)
    emission.define(first_result(call.node), result)


def _standardized_images(emission: Emission, tracked: Tracked, eps: float) -> Tracked:
    """Return images with mean 0 and variance 1 over all their channels, where they lie.

    Pooling over height and width and then over channels reads them as they are; one row of 1/K
    for a whole image would be as large as the image, and takes three times as long.
    """
    layout = Layout.CHANNELS_LAST
    pooled = (*tracked.shape[:2], 1, 1)

    def mean(tensor: Tracked, offset: float = 0.0) -> Tracked:
        """Return the mean of each image, of size 1 in all dimensions but the batch's."""
        value = mean_of_images(emission, emission.id_of(tensor, layout), pooled, layout)
        columns = emission.tracked(layout.arrange(pooled), value)
        share = emission.id_of(row_mean(emission, columns, offset))
        return emission.tracked((pooled[0], 1, 1, 1), share, layout)

    shifted = shift_by_first(emission, tracked, {1, 2, 3})
    centred = emission.binary(XnnOperator.SUBTRACT, shifted, mean(shifted))
    variance = mean(emission.unary(XnnOperator.SQUARE, centred), eps)
    factor = emission.unary(XnnOperator.RECIPROCAL_SQUARE_ROOT, variance)
    return emission.binary(XnnOperator.MULTIPLY, centred, factor)


def _standardized_by_channels(
    emission: Emission, tracked: Tracked, groups: int, eps: float
) -> Tracked:
    """Return images of any sizes with mean 0 and variance 1 over each group of their channels."""
    layout = Layout.CHANNELS_LAST
    batch, channels = tracked.shape[:2]
    pooled, rows = (batch, channels, 1, 1), (batch, groups, int(channels) // groups)

    def of_rows(tensor: Tracked) -> Tracked:
        """Return a number for each group as one for each of its channels."""
        ones = emission.tracked(
            (1, 1, rows[2]), emission.constant_value(torch.ones(1, 1, rows[2]))
        )
        spread = emission.binary(XnnOperator.MULTIPLY, tensor, ones, shape=rows)
        value = emission.reshaped(emission.id_of(spread), layout.arrange(pooled))
        return emission.tracked(pooled, value, layout)

    def mean(tensor: Tracked, offset: float = 0.0) -> Tracked:
        value = mean_of_images(emission, emission.id_of(tensor, layout), pooled, layout)
        means = emission.tracked(rows, emission.reshaped(value, rows))
        return of_rows(row_mean(emission, means, offset))

    first = emission.add(
        XnnOperator.STATIC_SLICE,
        pooled,
        layout,
        num_dims=4,
        offsets=(0, 0, 0, 0),
        sizes=(0, 1, 1, 0),
        input_id=emission.id_of(tracked, layout),
    )
    first = emission.add(
        XnnOperator.STATIC_SLICE,
        (*rows[:2], 1),
        num_dims=3,
        offsets=(0, 0, 0),
        sizes=(0, 0, 1),
        input_id=emission.reshaped(first, rows),
    )
    shifted = emission.binary(
        XnnOperator.SUBTRACT, tracked, of_rows(emission.tracked((*rows[:2], 1), first))
    )
    centred = emission.binary(XnnOperator.SUBTRACT, shifted, mean(shifted))
    variance = mean(emission.unary(XnnOperator.SQUARE, centred), eps)
    factor = emission.unary(XnnOperator.RECIPROCAL_SQUARE_ROOT, variance)
    return emission.binary(XnnOperator.MULTIPLY, centred, factor)


def _layer_norm_refusal(call: Call) -> str | None:
    folded = len(call.args["normalized_shape"])
    shape = call.shape("input")
    if not all(is_fixed(size) for size in shape[len(shape) - folded :]):
        return "it normalises over a symbolic size"
    return (symbols_refusal(shape) if folded > 1 else None) or first_result_refusal(call)


def _rms_norm_refusal(call: Call) -> str | None:
    eps = call.args["eps"]
    if eps is not None and not float(eps) > 0:
        return "its eps is not positive"
    return _layer_norm_refusal(call)


def _group_norm_refusal(call: Call) -> str | None:
    shape = call.shape("input")
    if len(shape) not in (3, 4) or not is_fixed(shape[1]):
        return _fixed_norm_refusal(call)
    return _norm_refusal(call)


def _fixed_norm_refusal(call: Call) -> str | None:
    if not all(is_fixed(size) for size in call.shape("input")[1:]):
        return "it normalises over a symbolic size"
    return _norm_refusal(call)


def _norm_refusal(call: Call) -> str | None:
    if not call.is_constant("weight") or not call.is_constant("bias"):
        return "its weight or bias is not constant"
    return first_result_refusal(call)


def _instance_norm_refusal(call: Call) -> str | None:
    args = call.args
    if not args["use_input_stats"]:
        return "it normalises by fixed statistics"
    if args["running_mean"] is not None or args["running_var"] is not None:
        return "it updates statistics"
    return _fixed_norm_refusal(call)


def batch_statistics_refusal(call: Call) -> str | None:
    """Return why a batch norm by the statistics of its input is refused, or None."""
    if call.rank("input") < 2:
        return "it needs at least 2 dimensions"
    if not is_one(call.shape("input")[0]) and not is_fixed(call.shape("input")[0]):
        return "it normalises over a symbolic size"
    return _fixed_norm_refusal(call)


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
