"""Convolutions: over two dimensions, over one, depthwise and transposed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from lowerdeck.serializer import XnnEncoding, XnnOperator
from lowerdeck.xnnpack.emit import (
    Call,
    Emission,
    Fields,
    Quantized,
    Range,
    Tracked,
    fits_half,
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
    window_fields,
)
from lowerdeck.xnnpack.operators.quantized_weights import (
    Filters,
    output_scales,
    store_channels,
    store_static,
    symmetric,
)
from lowerdeck.xnnpack.operators.results import following_clamp
from lowerdeck.xnnpack.payload.encoding import FLOAT, HALF, PER_IMAGE
from lowerdeck.xnnpack.payload.layout import Layout

_LAST = Layout.CHANNELS_LAST


@dataclass(frozen=True, slots=True)
class Convolution:
    """A convolution's settings, whichever operator it was written with.

    Attributes:
        windows: How its kernel lies along height and width.
        groups: Number of groups.
        transposed: Whether it is a transposed convolution.
        adjustment: Rows and columns to add to a transposed convolution's result.
    """

    windows: tuple[Window, Window]
    groups: int
    transposed: bool = False
    adjustment: tuple[int, ...] = (0, 0)

    @classmethod
    def of(cls, call: Call) -> Convolution:
        """Return the settings of a call; over one dimension they are those of width."""
        args, rank = call.args, call.rank("weight")
        kernel = [int(size) for size in image_sizes(call.shape("weight"))[2:]]
        stride, dilation = (spatial(args[name], rank, 1) for name in ("stride", "dilation"))
        if isinstance(args["padding"], str):
            same = args["padding"] == "same"
            reach = [step * (size - 1) * same for size, step in zip(kernel, dilation, strict=True)]
            # torch puts the odd row and column at the end
            sides = [(one // 2, one - one // 2) for one in reach]
        else:
            sides = [(one, one) for one in spatial(args["padding"], rank, 0)]
        rows, columns = (
            Window(kernel[axis], stride[axis], *sides[axis], dilation[axis]) for axis in (0, 1)
        )
        return cls(
            (rows, columns),
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
        if emission.is_rounded(call.args["input"]):
            try:
                _emit_dynamic(emission, call, settings, stored)
            except FloatNeededError as why:
                emission.in_float[call.node.name] = str(why)
            else:
                return
        else:
            emission.in_float[call.node.name] = "XNNPACK convolves no floats with integer weights"
    elif emission.writes.is_int8:
        raise FloatNeededError("its weight is not quantised")
    _emit_float(emission, call, settings)


def _emit_float(emission: Emission, call: Call, settings: Convolution) -> None:
    weight = emission.constant(call.args["weight"])
    bias = emission.optional(call.args["bias"])
    if weight.dim() == 3:
        weight = weight.unsqueeze(2)
    affine = following_batch_norm(call.node, emission)
    last, limits = following_clamp(call.node if affine is None else affine.last)
    filters, bias = _filters(weight, bias, settings, affine)
    image = image_of(emission, emission.of(call.args["input"]))
    if tuple(filters.shape) == (1, 1, 1, 1) and settings == _POINT:
        pixels = _scaled_pixels(emission, image, filters, bias, limits)
        emission.define(last, from_image(emission, pixels, shape_of(last)))
        return
    encoding = filter_encoding(emission, call.args["weight"], affine, filters, bias)
    ids = emission.packed(filters, encoding), emission.packed(bias, encoding)
    fields = fields_of(settings, weight.shape)
    _define(emission, _kind(settings, filters), image, ids, fields, last, limits)


def _define(
    emission: Emission,
    kind: XnnOperator,
    image: Tracked,
    weights: tuple[int, int],
    fields: Mapping[str, Fields],
    last: Node,
    limits: Range | None,
) -> None:
    """Define a node as a convolution of an image, with the ids of its filters and its bias."""
    filter_id, bias_id = weights
    shape = image_sizes(shape_of(last))
    value = emission.add(
        kind,
        shape,
        _LAST,
        limits,
        input1_id=image.ids[_LAST],
        filter_id=filter_id,
        bias_id=bias_id,
        **fields,
    )
    result = from_image(emission, emission.tracked(shape, value, _LAST), shape_of(last))
    emission.define(last, result)


def filter_encoding(
    emission: Emission,
    weight: Node,
    affine: Affine | None,
    filters: torch.Tensor,
    bias: torch.Tensor | None,
) -> XnnEncoding:
    """Return how filters and bias are stored: both alike, or the runtime's result is garbage.

    Args:
        emission: Where they will be added.
        weight: The weight.
        affine: A batch norm that is folded into them.
        filters: The weight in XNNPACK's order, folded.
        bias: The bias, folded.
    """
    if emission.writes == HALF:
        return FLOAT  # of halves the runtime refuses filters of halves
    data = emission.of(weight).data
    halves = affine is None and isinstance(data, torch.Tensor) and data.dtype == torch.float16
    if not (halves or emission.half_weights):
        return FLOAT
    return HALF if all(map(fits_half, [filters] if bias is None else [filters, bias])) else FLOAT


def _integer_filters(
    weight: Quantized, settings: Convolution, *, depthwise: bool
) -> tuple[Filters, torch.Tensor]:
    """Return integer filters in XNNPACK's order, and the weight in torch's with two sizes."""
    found = symmetric(weight)
    transposed = settings.transposed
    scales = output_scales(found, int(transposed), settings.groups if transposed else 1)
    data = found.data.unsqueeze(2) if found.data.dim() == 3 else found.data
    filters, _ = _filters(data, None, settings, None, depthwise=depthwise)
    in_depth = depthwise and _is_depthwise(settings, filters)
    return Filters(filters, scales, 3 if in_depth else 0), data


def _emit_static(emission: Emission, call: Call, settings: Convolution, weight: Quantized) -> None:
    filters, data = _integer_filters(weight, settings, depthwise=True)
    bias = emission.optional(call.args["bias"])
    ids = store_static(emission, filters, bias, emission.of(call.args["input"]).encoding)
    last, limits = following_clamp(call.node)
    image = image_of(emission, emission.of(call.args["input"]))
    fields = fields_of(settings, data.shape)
    _define(emission, _kind(settings, filters.data), image, ids, fields, last, limits)


def _emit_dynamic(
    emission: Emission, call: Call, settings: Convolution, weight: Quantized
) -> None:
    # Beside integers whose scales are found at run time there is no depthwise convolution.
    filters, data = _integer_filters(weight, settings, depthwise=False)
    filter_id = store_channels(emission, filters)
    last, limits = following_clamp(call.node)
    kind = XnnOperator.CONV_TRANSPOSE_2D if settings.transposed else XnnOperator.CONV2D
    with emission.stored(FLOAT, FLOAT):
        image = image_of(emission, emission.of(call.args["input"]))
        value = emission.dynamic(image.ids[_LAST], image.shape, _LAST, PER_IMAGE)
        image = emission.tracked(image.shape, value, _LAST)
        ids = filter_id, emission.packed(emission.optional(call.args["bias"]), FLOAT)
        _define(emission, kind, image, ids, fields_of(settings, data.shape), last, limits)


_POINT = Convolution((Window(), Window()), groups=1)


def _scaled_pixels(
    emission: Emission,
    pixels: Tracked,
    filters: torch.Tensor,
    bias: torch.Tensor | None,
    limits: Range | None,
) -> Tracked:
    # The runtime lets a pixel that is not finite leak into others when one channel makes one.
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
    if settings.transposed:
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


def fields_of(settings: Convolution, weight: Sequence[int]) -> dict[str, Fields]:
    """Return the fields of a convolution's node.

    Args:
        settings: How it convolves.
        weight: The sizes of its weight, as torch has them.
    """
    groups = settings.groups
    if settings.transposed:
        channels_in, channels_out = weight[0] // groups, weight[1]
    else:
        channels_in, channels_out = weight[1], weight[0] // groups
    return {
        **window_fields(*settings.windows, "kernel", "subsampling"),
        "group_input_channels": channels_in,
        "group_output_channels": channels_out,
        "groups": groups,
        "adjustment_height": settings.adjustment[0],
        "adjustment_width": settings.adjustment[1],
    }


def _refusal(call: Call) -> str | None:
    if not call.is_constant("weight") or not call.is_constant("bias"):
        return "its weight or bias is not constant"
    ranks = call.rank("input"), call.rank("weight")
    if ranks not in ((4, 4), (3, 3)):
        return f"an input of {ranks[0]} dimensions; with a batch, 3 or 4 are needed"
    reason = line_refusal(call) if ranks == (3, 3) else None
    if reason is not None:
        return reason
    if isinstance(call.args["padding"], (list, tuple)) and min(call.args["padding"]) < 0:
        return "negative padding"
    return None


_CONVOLUTION = Operator(
    _emit, _refusal, integers=Integers.CHOOSES, clamps=True, packs=("weight", "bias")
)
CONVOLUTIONS: Table = table(
    {
        "conv1d conv1d.padding conv2d conv2d.padding convolution": _CONVOLUTION,
        "conv_transpose1d conv_transpose2d.input": _CONVOLUTION,
    }
)
