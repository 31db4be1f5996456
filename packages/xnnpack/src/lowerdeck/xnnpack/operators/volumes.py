"""Convolutions and pools over depth, height and width, as those over images that XNNPACK has.

Memory holds volumes as N, D, H, W, C. A convolution's kernel in depth becomes channels: slices
that lie one after the other are joined beside each other. A pool is one over height and width,
and another over depth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.fx import Node

from lowerdeck.serializer import XnnOperator
from lowerdeck.xnnpack.emit import Call, Emission, Quantized, Tracked, is_fixed, joined, shape_of
from lowerdeck.xnnpack.operators.batch_norm import following_batch_norm
from lowerdeck.xnnpack.operators.clamps import following_clamp
from lowerdeck.xnnpack.operators.contract import FloatNeededError, Integers, Operator, Table
from lowerdeck.xnnpack.operators.convolution import (
    CONVOLUTIONS,
    Convolution,
    fields_of,
    filter_encoding,
)
from lowerdeck.xnnpack.operators.first_result import first_result, first_result_refusal
from lowerdeck.xnnpack.operators.images import padded, pool
from lowerdeck.xnnpack.operators.pieces import stretch
from lowerdeck.xnnpack.operators.quantized_weights import (
    Filters,
    output_scales,
    store_static,
    symmetric,
)
from lowerdeck.xnnpack.operators.reductions import mean_over
from lowerdeck.xnnpack.payload.layout import Layout

_aten = torch.ops.aten
_LAST = Layout.CHANNELS_LAST
_RANK = 5


def _three(given: int | Sequence[int]) -> tuple[int, int, int]:
    """Return what an argument says of depth, height and width."""
    values = [given] if isinstance(given, int) else [int(one) for one in given]
    depth, height, width = values * 3 if len(values) == 1 else values
    return depth, height, width


def _volume_refusal(call: Call, name: str) -> str | None:
    shape = call.shape(name)
    if len(shape) != _RANK:
        return f"an input of {len(shape)} dimensions; with a batch, 5 are needed"
    if not all(is_fixed(size) for size in shape[1:]):
        return "a symbolic size beside the batch's"
    return None


def _emit_convolution(emission: Emission, call: Call) -> None:
    if emission.writes.is_int8:
        _emit_static(emission, call)
        return
    args = call.args
    weight = emission.constant(args["weight"])
    bias = emission.optional(args["bias"])
    affine = following_batch_norm(call.node, emission)
    filters = _slices_joined(weight)
    if affine is not None:
        filters = (filters.double() * affine.scale.reshape(-1, 1, 1, 1)).float()
        moved = affine.shift if bias is None else bias.double() * affine.scale + affine.shift
        bias = moved.float()
    encoding = filter_encoding(emission, args["weight"], affine, filters, bias)
    ids = emission.packed(filters, encoding), emission.packed(bias, encoding)
    _convolve(emission, call, call.node if affine is None else affine.last, *ids)


def _emit_static(emission: Emission, call: Call) -> None:
    """Convolve integers: what moves slices moves them as well, and one convolution sums them."""
    stored = emission.of(call.args["weight"]).data
    if not isinstance(stored, Quantized):
        raise FloatNeededError("its weight is not quantised")
    weight = symmetric(stored)
    filters = Filters(_slices_joined(weight.data), output_scales(weight, 0, 1), 0)
    bias = emission.optional(call.args["bias"])
    ids = store_static(emission, filters, bias, emission.of(call.args["input"]).encoding)
    _convolve(emission, call, call.node, *ids)


def _slices_joined(weight: torch.Tensor) -> torch.Tensor:
    """Return filters of images whose channels are those of all slices of the kernel."""
    outer, _, _, height, width = weight.shape
    return weight.permute(0, 3, 4, 2, 1).reshape(outer, height, width, -1)


def _convolve(emission: Emission, call: Call, node: Node, filter_id: int, bias_id: int) -> None:
    """Define a node, and a clamp after it, as the convolution of a call."""
    args = call.args
    stride, padding, dilation = (_three(args[name]) for name in ("stride", "padding", "dilation"))
    groups = int(args["groups"])
    outer, each, *kernel = (int(size) for size in call.shape("weight"))
    last, limits = following_clamp(node)
    batch, outputs, depth, height, width = shape_of(last)
    tracked = emission.of(args["input"])
    moved = tracked.encoding if tracked.encoding.is_int8 else emission.writes
    with emission.stored(None if moved.is_int8 else emission.reads, moved):
        slices = _depth_as_channels(
            emission,
            tracked,
            *(kernel[0], stride[0], padding[0], dilation[0], int(depth), groups),
        )
    settings = Convolution(
        stride=stride[1:],
        padding=(padding[1], padding[2], padding[1], padding[2]),
        dilation=dilation[1:],
        groups=groups,
    )
    value = emission.add(
        XnnOperator.CONV2D,
        (batch * depth, outputs, height, width),
        _LAST,
        limits,
        input1_id=slices,
        filter_id=filter_id,
        bias_id=bias_id,
        **fields_of(settings, (outer, each * kernel[0], *kernel[1:])),
    )
    volume = (batch, depth, height, width, outputs)
    emission.define_value(last, emission.reshaped(value, volume), _LAST)


def _depth_as_channels(
    emission: Emission,
    tracked: Tracked,
    kernel: int,
    stride: int,
    padding: int,
    dilation: int,
    results: int,
    groups: int,
) -> int:
    """Return images, one for each result in depth, with all channels that its window reads."""
    batch, channels, depth, height, width = tracked.shape
    value = emission.id_of(tracked, _LAST)
    # Each slice is as long as its results have steps, the last one's included.
    end = max(padding, (kernel - 1) * dilation + results * stride - int(depth) - padding)
    if padding or end:
        depth = padding + int(depth) + end
        wide = (batch, channels, depth, height, width)
        value = padded(emission, value, wide, (0, padding, 0, 0, 0), (0, end, 0, 0, 0), _LAST)
    each = int(channels) // groups
    volume = emission.tracked((batch, depth, height, width, channels), value)
    image = (batch * results, height, width, groups, each)
    parts: list[Tracked] = []
    for number in range(kernel):
        part = stretch(emission, volume, 1, number * dilation, results * stride)
        if stride > 1:
            # Those that are left out become rows below the image, and are cut off.
            tall = emission.view(part, (batch, results, stride * int(height), width, channels))
            part = stretch(emission, tall, 2, 0, int(height))
        parts.append(emission.view(part, image) if kernel > 1 else part)
    if kernel > 1:
        parts = [joined(emission, parts, len(image) - 1)]
    shape = (batch * results, height, width, channels * kernel)
    return emission.id_of(emission.view(parts[0], shape))


def _convolution_refusal(call: Call) -> str | None:
    if not call.is_constant("weight") or not call.is_constant("bias"):
        return "its weight or bias is not constant"
    if call.args.get("transposed"):
        return "XNNPACK has no transposed convolution of volumes"
    if min(_three(call.args["padding"])) < 0:
        return "negative padding"
    return _volume_refusal(call, "input")


def _emit_any(emission: Emission, call: Call) -> None:
    emit = _emit_convolution if call.rank("input") == _RANK else _IMAGES.emit
    emit(emission, call)


def _any_refusal(call: Call) -> str | None:
    return (_convolution_refusal if call.rank("input") == _RANK else _IMAGES.refusal)(call)


def _emit_pool(emission: Emission, call: Call) -> None:
    args = call.args
    is_mean = call.node.target is _aten.avg_pool3d.default
    kind = XnnOperator.AVG_POOLING_2D if is_mean else XnnOperator.MAX_POOLING_2D
    result = first_result(call.node)
    kernel, stride = _windows(call)
    padding, dilation = _three(args["padding"]), _three(args.get("dilation", 1))
    last, limits = (result, None) if is_mean else following_clamp(result)
    batch, channels, *sizes = emission.of(args["self"]).shape
    wanted = [int(size) for size in shape_of(result)[2:]]
    ends = [
        # With ceil_mode the last window may reach beyond the padding.
        max(
            padding[axis],
            (wanted[axis] - 1) * stride[axis]
            + dilation[axis] * (kernel[axis] - 1)
            + 1
            - int(sizes[axis])
            - padding[axis],
        )
        for axis in range(3)
    ]
    value = emission.id_of(emission.of(args["self"]), _LAST)
    if _is_window(kernel[1:], stride[1:]):
        flat = (batch * sizes[0], *sizes[1:], channels)
        value = pool(
            *(emission, kind, emission.reshaped(value, flat)),
            (batch * sizes[0], channels, *wanted[1:]),
            kernel=kernel[1:],
            stride=stride[1:],
            padding=(padding[1], ends[2], ends[1], padding[2]),
            dilation=dilation[1:],
            limits=limits,
        )
    if _is_window(kernel[:1], stride[:1]):
        area = math.prod(wanted[1:])
        columns = (batch, sizes[0], area, channels)
        value = pool(
            *(emission, kind, emission.reshaped(value, columns)),
            (batch, channels, wanted[0], area),
            kernel=(kernel[0], 1),
            stride=(stride[0], 1),
            padding=(padding[0], 0, ends[0], 0),
            dilation=(dilation[0], 1),
            limits=limits,
        )
    volume = (batch, *wanted, channels)
    emission.define_value(last, emission.reshaped(value, volume), _LAST)


def _windows(call: Call) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Return the kernel and the stride of a pool."""
    kernel = call.args["kernel_size"]
    return _three(kernel), _three(call.args["stride"] or kernel)


def _is_window(kernel: Sequence[int], stride: Sequence[int]) -> bool:
    return math.prod(kernel) > 1 or math.prod(stride) > 1


def _pool_refusal(call: Call) -> str | None:
    reason = first_result_refusal(call) or _volume_refusal(call, "self")
    if reason is not None:
        return reason
    kernel, stride = _windows(call)
    alone = [math.prod(kernel[:1]) == 1, math.prod(kernel[1:]) == 1]
    steps = [math.prod(stride[:1]) > 1, math.prod(stride[1:]) > 1]
    if all(alone) or any(one and step for one, step in zip(alone, steps, strict=True)):
        return "windows of one element, which XNNPACK does not pool"
    if call.node.target is not _aten.avg_pool3d.default:
        return None
    if call.args["ceil_mode"]:
        return "ceil_mode, whose last windows divide by another number"
    counted = call.args["count_include_pad"] and any(_three(call.args["padding"]))
    if counted or call.args["divisor_override"]:
        return "it divides by another number than that of its true elements"
    return None


def _emit_whole_mean(emission: Emission, call: Call) -> None:
    tracked = emission.of(call.args["self"])
    emission.define(call.node, mean_over(emission, tracked, (2, 3, 4), keep=True))


def _whole_mean_refusal(call: Call) -> str | None:
    if _three(call.args["output_size"]) != (1, 1, 1):
        return "its windows are not all of the volume"
    return _volume_refusal(call, "self")


_IMAGES = CONVOLUTIONS[_aten.convolution.default]
_POOL = Operator(_emit_pool, _pool_refusal)
_WHOLE_MEAN = Operator(_emit_whole_mean, _whole_mean_refusal, wide=True)
VOLUMES: Table = {
    _aten.conv3d.default: Operator(
        _emit_convolution,
        _convolution_refusal,
        integers=Integers.CHOOSES,
        clamps=True,
        packs=("weight", "bias"),
    ),
    _aten.max_pool3d.default: _POOL,
    _aten.max_pool3d_with_indices.default: _POOL,
    _aten.avg_pool3d.default: _POOL,
    _aten.adaptive_avg_pool3d.default: _WHOLE_MEAN,
    _aten._adaptive_avg_pool3d.default: _WHOLE_MEAN,
    _aten.convolution.default: replace(_IMAGES, emit=_emit_any, refusal=_any_refusal),
}
