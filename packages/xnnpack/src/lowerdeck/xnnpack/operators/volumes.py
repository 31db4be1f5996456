"""Convolutions over depth, height and width, as those over images that XNNPACK has.

Memory holds volumes as N, D, H, W, C. A convolution's kernel in depth becomes channels: slices
that lie one after the other are joined beside each other.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.fx import Node

from lowerdeck.serializer import XnnOperator
from lowerdeck.xnnpack.emit import Call, Emission, Quantized, Tracked, joined, shape_of
from lowerdeck.xnnpack.operators.batch_norm import following_batch_norm
from lowerdeck.xnnpack.operators.contract import FloatNeededError, Table
from lowerdeck.xnnpack.operators.convolution import (
    CONVOLUTIONS,
    Convolution,
    fields_of,
    filter_encoding,
)
from lowerdeck.xnnpack.operators.images import Window, padded, spatial, volume_refusal
from lowerdeck.xnnpack.operators.pieces import stretch
from lowerdeck.xnnpack.operators.quantized_weights import (
    Filters,
    output_scales,
    store_static,
    symmetric,
)
from lowerdeck.xnnpack.operators.results import following_clamp
from lowerdeck.xnnpack.payload.layout import Layout

_aten = torch.ops.aten
_LAST = Layout.CHANNELS_LAST
_RANK = 5


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
        filters, bias = affine.fold(filters, bias, 0)
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
    stride, padding, dilation = (
        spatial(args[name], _RANK, 0) for name in ("stride", "padding", "dilation")
    )
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
    rows, columns = (
        Window(kernel[axis], stride[axis], padding[axis], padding[axis], dilation[axis])
        for axis in (1, 2)
    )
    settings = Convolution((rows, columns), groups)
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
    value = emission.reshaped(value, volume)
    emission.define(last, emission.tracked(shape_of(last), value, _LAST))


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
    if min(spatial(call.args["padding"], _RANK, 0)) < 0:
        return "negative padding"
    return volume_refusal(call)


def _emit_any(emission: Emission, call: Call) -> None:
    emit = _emit_convolution if call.rank("input") == _RANK else _IMAGES.emit
    emit(emission, call)


def _any_refusal(call: Call) -> str | None:
    return (_convolution_refusal if call.rank("input") == _RANK else _IMAGES.refusal)(call)


_IMAGES = CONVOLUTIONS[_aten.convolution.default]
VOLUMES: Table = {
    _aten.conv3d.default: replace(_IMAGES, emit=_emit_convolution, refusal=_convolution_refusal),
    _aten.convolution.default: replace(_IMAGES, emit=_emit_any, refusal=_any_refusal),
}
