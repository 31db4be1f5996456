"""Layer and group normalisation, made of what the runtime has."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.types import IntLikeType as Dim

from lowerdeck.xnnpack.emit import Call, Emission, Tracked, is_fixed
from lowerdeck.xnnpack.operators.contract import Operator, Table
from lowerdeck.xnnpack.operators.first_result import (
    first_result,
    first_result_refusal,
)
from lowerdeck.xnnpack.payload.layout import Layout
from lowerdeck.xnnpack.payload.schema import KEEP_DIMS, NONE, NodeKind

_aten = torch.ops.aten


def row_mean(emission: Emission, value: int, shape: Sequence[Dim], offset: float = 0.0) -> int:
    """Return the mean of ``value`` along its last dimension, which stays with size 1.

    The runtime has no such reduction; a linear layer with one row of 1/K computes it.

    Args:
        emission: Where to add.
        value: What to average, in the plain layout.
        shape: Its sizes; the last is a number.
        offset: What to add to the mean.

    Returns:
        The id of the mean.
    """
    count = int(shape[-1])
    row = emission.constant_value(torch.full((1, count), 1 / count), packed=True)
    bias = emission.constant_value(torch.tensor([offset]), packed=True) if offset else NONE
    return emission.add(
        NodeKind.FULLY_CONNECTED,
        (*shape[:-1], 1),
        input1_id=value,
        filter_id=row,
        bias_id=bias,
    )


def _standardized(emission: Emission, value: int, shape: Sequence[Dim], eps: float) -> int:
    """Return ``value`` with mean 0 and variance 1 along its last dimension."""

    def binary(kind: NodeKind, left: int, right: int) -> int:
        return emission.add(kind, shape, input1_id=left, input2_id=right)

    centred = binary(NodeKind.SUBTRACT, value, row_mean(emission, value, shape))
    squares = emission.add(NodeKind.SQUARE, shape, input_id=centred)
    variance = row_mean(emission, squares, shape, offset=eps)
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
    if eps is None:
        eps = torch.finfo(args["input"].meta["val"].dtype).eps
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
        value = _standardized(emission, value, shape, call.args["eps"])
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
    shape = tracked.shape
    layout = Layout.PLAIN
    if groups == 1 and len(shape) == 4 and tracked.preferred is Layout.CHANNELS_LAST:
        layout = tracked.preferred
        value = _standardized_images(emission, tracked, args["eps"])
    else:
        flat = (shape[0], groups, math.prod(int(size) for size in shape[1:]) // groups)
        value = emission.reshaped(emission.id_of(tracked), flat)
        value = emission.reshaped(_standardized(emission, value, flat, args["eps"]), shape)
    scale, shift = (
        None
        if args[name] is None
        else Tracked(
            (1, shape[1], *(1,) * (len(shape) - 2)),
            emission.constant(args[name]).reshape(1, -1, *(1,) * (len(shape) - 2)),
        )
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

    value = emission.id_of(tracked, layout)
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


_LAYER_NORM = Operator(_layer_norm, _layer_norm_refusal, wide=True)
_GROUP_NORM = Operator(_group_norm, _group_norm_refusal, wide=True)
NORMALIZATION: Table = {
    _aten.layer_norm.default: _LAYER_NORM,
    _aten.native_layer_norm.default: _LAYER_NORM,
    _aten.rms_norm.default: Operator(_rms_norm, _rms_norm_refusal, wide=True),
    _aten.group_norm.default: _GROUP_NORM,
    _aten.native_group_norm.default: _GROUP_NORM,
}
