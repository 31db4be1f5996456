"""1-D to 3-D convolutions, depthwise and transposed.

Volumes are stored as N, D, H, W, C. The depth of a kernel is lowered to channels: consecutive
slices are concatenated along the channels and convolved as images.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.fx import Node
from torch.types import IntLikeType as Dim

from lowerdeck.serializer import XnnEncoding, XnnOperator
from lowerdeck.xnnpack.emit import (
    Call,
    Emission,
    Fields,
    Quantized,
    Range,
    Tracked,
    fits_half,
    joined,
    shape_of,
)
from lowerdeck.xnnpack.operators.batch_norm import Affine, following_batch_norm
from lowerdeck.xnnpack.operators.contract import FloatNeededError, Integers, Operator, Table, table
from lowerdeck.xnnpack.operators.images import (
    Window,
    from_image,
    image_of,
    image_sizes,
    line_refusal,
    spatial,
    volume_refusal,
    window_fields,
)
from lowerdeck.xnnpack.operators.quantization import reads_rounded_rows
from lowerdeck.xnnpack.operators.quantized_layers import (
    Filters,
    output_scales,
    store_channels,
    store_static,
    symmetric,
)
from lowerdeck.xnnpack.operators.results import following_clamp
from lowerdeck.xnnpack.payload import FLOAT, HALF, PER_IMAGE, Layout

_LAST = Layout.CHANNELS_LAST


class Convolution(NamedTuple):
    """Settings of a convolution, independent of its operator.

    Attributes:
        windows: Kernel windows along height and width, preceded by depth if there is one.
        transposed: Whether it is a transposed convolution.
        adjustment: Rows and columns added to the result of a transposed convolution.
    """

    windows: tuple[Window, ...]
    groups: int
    transposed: bool = False
    adjustment: tuple[int, ...] = (0, 0)

    @classmethod
    def of(cls, call: Call) -> Convolution:
        """Return the settings of a call; 1-D convolutions use those of the width."""
        args, rank = call.args, call.rank("weight")
        kernel = [int(size) for size in image_sizes(call.shape("weight"))[2:]]
        stride, dilation = (spatial(args[name], rank, 1) for name in ("stride", "dilation"))
        if isinstance(args["padding"], str):
            same = args["padding"] == "same"
            reach = [step * (size - 1) * same for size, step in zip(kernel, dilation, strict=True)]
            # torch puts the odd row and column at the end
            sides = [(total // 2, total - total // 2) for total in reach]
        else:
            sides = [(amount, amount) for amount in spatial(args["padding"], rank, 0)]
        return cls(
            tuple(
                Window(size, step, *around, reach)
                for size, step, around, reach in zip(kernel, stride, sides, dilation, strict=True)
            ),
            groups=int(args["groups"]),
            transposed=bool(args.get("transposed", "transpose" in str(call.node.target))),
            adjustment=spatial(args.get("output_padding", 0), rank, 0),
        )


def _emit(emission: Emission, call: Call) -> None:
    settings = Convolution.of(call)
    stored = emission.of(call.args["weight"]).data
    if isinstance(stored, Quantized):
        if emission.writes.is_int8:
            _emit_static(emission, call, settings, stored)
            return
        why = "XNNPACK has no convolution of float inputs with integer weights"
        if reads_rounded_rows(call.node) and len(settings.windows) == 2:
            try:
                _emit_dynamic(emission, call, settings, stored)
            except FloatNeededError as error:
                why = str(error)
            else:
                return
        emission.in_float[call.node.name] = why
    elif emission.writes.is_int8:
        raise FloatNeededError("its weight is not quantised")
    _emit_float(emission, call, settings)


def _emit_float(emission: Emission, call: Call, settings: Convolution) -> None:
    weight = emission.constant(call.args["weight"])
    bias = emission.optional(call.args["bias"])
    affine = following_batch_norm(call.node, emission)
    last, limits = following_clamp(call.node if affine is None else affine.last)
    filters, bias = _filters(weight, bias, settings, affine)
    image = _image(emission, call, settings)
    if tuple(filters.shape) == (1, 1, 1, 1) and settings == _POINT:
        pixels = _scaled_pixels(emission, image, filters, bias, limits)
        emission.define(last, from_image(emission, pixels, shape_of(last)))
        return
    encoding = _filter_encoding(emission, call.args["weight"], affine, filters, bias)
    ids = emission.packed(filters, encoding), emission.packed(bias, encoding)
    _define(emission, call, settings, _kind(settings, filters), image, ids, last, limits)


def _image(emission: Emission, call: Call, settings: Convolution) -> Tracked:
    """Return the input as images; slices of quantised volumes are not dequantised."""
    tracked = emission.of(call.args["input"])
    if len(settings.windows) == 2:
        return image_of(emission, tracked)
    moved = tracked.encoding if tracked.encoding.is_int8 else emission.writes
    with emission.stored(None if moved.is_int8 else emission.reads, moved):
        return _depth_as_channels(emission, tracked, settings, int(call.result[2]))


def _depth_as_channels(
    emission: Emission, tracked: Tracked, settings: Convolution, results: int
) -> Tracked:
    """Return an image for each depth of the result: the slices of its window as channels."""
    batch, channels, depth, height, width = tracked.shape
    kernel, stride, padding, _, dilation = settings.windows[0]
    # Each slice covers the strides of all results.
    end = max(padding, (kernel - 1) * dilation + results * stride - int(depth) - padding)
    if padding or end:
        tracked = emission.padded(tracked, (0, 0, padding, 0, 0), (0, 0, end, 0, 0), layout=_LAST)
    group_channels = int(channels) // settings.groups
    volume = emission.tracked(_LAST.arrange(tracked.shape), emission.id_of(tracked, _LAST))
    image = (batch * results, height, width, settings.groups, group_channels)
    parts: list[Tracked] = []
    for number in range(kernel):
        part = emission.sliced(volume, 1, number * dilation, results * stride)
        if stride > 1:
            # The slices between strides become rows below the image, and are cut off.
            tall = emission.view(part, (batch, results, stride * int(height), width, channels))
            part = emission.sliced(tall, 2, 0, int(height))
        parts.append(emission.view(part, image) if kernel > 1 else part)
    if kernel > 1:
        parts = [joined(emission, parts, len(image) - 1)]
    shape = (batch * results, channels * kernel, height, width)
    value = emission.id_of(emission.view(parts[0], _LAST.arrange(shape)))
    return emission.tracked(shape, value, _LAST)


def _define(
    emission: Emission,
    call: Call,
    settings: Convolution,
    kind: XnnOperator,
    image: Tracked,
    weights: tuple[int, int],
    last: Node,
    limits: Range | None,
) -> None:
    """Emit a convolution of an image, given the ids of filters and bias."""
    filter_id, bias_id = weights
    batch, channels, *sizes = shape_of(last)
    shape = (image.shape[0], channels, *image_sizes((batch, channels, *sizes))[2:][-2:])
    value = emission.add(
        kind,
        shape,
        _LAST,
        limits,
        input1_id=image.ids[_LAST],
        filter_id=filter_id,
        bias_id=bias_id,
        **_fields(settings, call.shape("weight")),
    )
    result = from_image(emission, emission.tracked(shape, value, _LAST), shape_of(last))
    emission.define(last, result)


def _filter_encoding(
    emission: Emission,
    weight: Node,
    affine: Affine | None,
    filters: torch.Tensor,
    bias: torch.Tensor | None,
) -> XnnEncoding:
    """Return one encoding for filters and bias, as the runtime requires."""
    if emission.writes == HALF:
        return FLOAT  # the runtime refuses float16 filters for float16 inputs
    data = emission.of(weight).data
    halves = affine is None and isinstance(data, torch.Tensor) and data.dtype == torch.float16
    if not (halves or emission.half_weights):
        return FLOAT
    return HALF if all(map(fits_half, [filters] if bias is None else [filters, bias])) else FLOAT


def _integer_filters(weight: Quantized, settings: Convolution, *, depthwise: bool) -> Filters:
    """Return integer filters in XNNPACK's order."""
    quantized, transposed = symmetric(weight), settings.transposed
    scales = output_scales(quantized, int(transposed), settings.groups if transposed else 1)
    filters, _ = _filters(quantized.data, None, settings, None, depthwise=depthwise)
    in_depth = depthwise and _is_depthwise(settings, filters)
    return Filters(filters, scales, 3 if in_depth else 0)


def _emit_static(emission: Emission, call: Call, settings: Convolution, weight: Quantized) -> None:
    filters = _integer_filters(weight, settings, depthwise=True)
    bias = emission.optional(call.args["bias"])
    ids = store_static(emission, filters, bias, emission.of(call.args["input"]).encoding)
    last, limits = following_clamp(call.node)
    image, kind = _image(emission, call, settings), _kind(settings, filters.data)
    _define(emission, call, settings, kind, image, ids, last, limits)


def _emit_dynamic(
    emission: Emission, call: Call, settings: Convolution, weight: Quantized
) -> None:
    # XNNPACK has no dynamically quantised depthwise convolution.
    filter_id = store_channels(emission, _integer_filters(weight, settings, depthwise=False))
    last, limits = following_clamp(call.node)
    kind = XnnOperator.CONV_TRANSPOSE_2D if settings.transposed else XnnOperator.CONV2D
    with emission.stored(FLOAT, FLOAT):
        image = _image(emission, call, settings)
        value = emission.dynamic(image.ids[_LAST], image.shape, _LAST, PER_IMAGE)
        image = emission.tracked(image.shape, value, _LAST)
        ids = filter_id, emission.packed(emission.optional(call.args["bias"]), FLOAT)
        _define(emission, call, settings, kind, image, ids, last, limits)


_POINT = Convolution((Window(), Window()), groups=1)


def _scaled_pixels(
    emission: Emission,
    pixels: Tracked,
    filters: torch.Tensor,
    bias: torch.Tensor | None,
    limits: Range | None,
) -> Tracked:
    # With one input and one output channel the runtime leaks non-finite pixels into others.
    first = limits if bias is None else None
    pixels = emission.binary(XnnOperator.MULTIPLY, pixels, float(filters), first)
    if bias is None:
        return pixels
    return emission.binary(XnnOperator.ADD, pixels, float(bias), limits)


def _kind(settings: Convolution, filters: torch.Tensor) -> XnnOperator:
    if settings.transposed:
        return XnnOperator.CONV_TRANSPOSE_2D
    return XnnOperator.DEPTHWISE_CONV2D if _is_depthwise(settings, filters) else XnnOperator.CONV2D


def _is_depthwise(settings: Convolution, filters: torch.Tensor) -> bool:
    return settings.groups > 1 and filters.shape[0] == 1 and not settings.transposed


def _filters(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    settings: Convolution,
    affine: Affine | None,
    *,
    depthwise: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return filters in XNNPACK's order, and the bias, with a batch norm folded into both."""
    groups = settings.groups
    weight = weight.unsqueeze(2) if weight.dim() == 3 else weight
    if weight.dim() == 5:
        outer, _, _, height, width = weight.shape
        filters = weight.permute(0, 3, 4, 2, 1).reshape(outer, height, width, -1)
    elif settings.transposed:
        channels, per_group, height, width = weight.shape
        parts = weight.reshape(groups, channels // groups, per_group, height, width)
        filters = parts.permute(0, 2, 3, 4, 1).reshape(-1, height, width, channels // groups)
    elif groups > 1 and weight.shape[1] == 1 and depthwise:
        filters = weight.permute(1, 2, 3, 0)
    else:
        filters = weight.permute(0, 2, 3, 1)
    if affine is None:
        return filters, bias
    return affine.fold(filters, bias, 3 if _is_depthwise(settings, filters) else 0)


def _fields(settings: Convolution, weight: Sequence[Dim]) -> dict[str, Fields]:
    """Return the node fields of a convolution for a weight of torch's shape."""
    groups, outer, inner = settings.groups, int(weight[0]), int(weight[1])
    *depth, rows, columns = settings.windows
    inputs, outputs = (outer // groups, inner) if settings.transposed else (inner, outer // groups)
    return {
        **window_fields(rows, columns, "kernel", "subsampling"),
        "group_input_channels": inputs * (depth[0].kernel if depth else 1),
        "group_output_channels": outputs,
        "groups": groups,
        "adjustment_height": settings.adjustment[0],
        "adjustment_width": settings.adjustment[1],
    }


def _refusal(call: Call) -> str | None:
    if not call.is_constant("weight") or not call.is_constant("bias"):
        return "its weight or bias is not constant"
    ranks = call.rank("input"), call.rank("weight")
    if ranks not in ((5, 5), (4, 4), (3, 3)):
        return f"its input has {ranks[0]} dimensions; {ranks[1]} are needed, with the batch"
    if isinstance(call.args["padding"], (list, tuple)) and min(call.args["padding"]) < 0:
        return "its padding is negative"
    if ranks == (5, 5) and call.args.get("transposed"):
        return "XNNPACK has no transposed convolution of volumes"
    refusals = {3: line_refusal, 5: volume_refusal}
    return refusals[ranks[0]](call) if ranks[0] in refusals else None


_CONVOLUTION = Operator(
    _emit, _refusal, integers=Integers.CHOOSES, clamps=True, packs=("weight", "bias")
)
CONVOLUTIONS: Table = table(
    {
        "conv1d conv1d.padding conv2d conv2d.padding conv3d convolution": _CONVOLUTION,
        "conv_transpose1d conv_transpose2d.input": _CONVOLUTION,
    }
)
