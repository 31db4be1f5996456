"""Pools over height and width, and resizing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.types import IntLikeType as Dim

from lowerdeck.serializer import XnnNode, XnnOperator
from lowerdeck.xnnpack.emit import Call, Emission, is_fixed, shape_of
from lowerdeck.xnnpack.operators.clamps import following_clamp
from lowerdeck.xnnpack.operators.contract import Integers, Operator, Scales, Table
from lowerdeck.xnnpack.operators.first_result import (
    first_result,
    first_result_refusal,
)
from lowerdeck.xnnpack.operators.images import (
    Pair,
    define_image,
    image_of,
    image_sizes,
    line_refusal,
    mean_of_images,
    of_height_and_width,
    padded,
    pool,
)
from lowerdeck.xnnpack.operators.storage import rounded_after
from lowerdeck.xnnpack.payload.layout import Layout

_aten = torch.ops.aten
_LAST = Layout.CHANNELS_LAST
_OF_LINES = frozenset(
    {_aten.max_pool1d.default, _aten.avg_pool1d.default, _aten.adaptive_avg_pool1d.default}
)


def _max_pool(emission: Emission, call: Call) -> None:
    args = call.args
    result = first_result(call.node)
    tracked = emission.of(args["self"])
    rank = len(tracked.shape)
    kernel, stride = _windows(call)
    padding = of_height_and_width(args["padding"], rank, 0)
    dilation = of_height_and_width(args["dilation"], rank, 1)
    last, limits = following_clamp(result)
    value, sizes = image_of(emission, tracked)
    shape = image_sizes(shape_of(result))
    beyond = (0, 0)
    if args["ceil_mode"]:
        beyond = _beyond(sizes, shape, kernel, stride, padding, dilation)
    value = pool(
        emission,
        XnnOperator.MAX_POOLING_2D,
        value,
        shape,
        kernel=kernel,
        stride=stride,
        padding=(padding[0], padding[1] + beyond[1], padding[0] + beyond[0], padding[1]),
        dilation=dilation,
        limits=limits,
    )
    define_image(emission, last, value)


def _beyond(
    sizes: Sequence[Dim],
    shape: Sequence[Dim],
    kernel: Pair,
    stride: Pair,
    padding: Pair,
    dilation: Pair = (1, 1),
) -> Pair:
    """Return how far the last windows reach beyond the padding, as they may in ``ceil_mode``."""
    height, width = (
        max(
            (int(shape[2 + axis]) - 1) * stride[axis]
            + dilation[axis] * (kernel[axis] - 1)
            + (1 - int(sizes[2 + axis]) - 2 * padding[axis]),
            0,
        )
        for axis in (0, 1)
    )
    return height, width


def _windows(call: Call) -> tuple[Pair, Pair]:
    """Return the kernel and the stride of a pool, over height and width."""
    args, rank = call.args, call.rank("self")
    kernel = of_height_and_width(args["kernel_size"], rank, 1)
    return kernel, of_height_and_width(args["stride"] or args["kernel_size"], rank, 1)


def _max_pool_refusal(call: Call) -> str | None:
    reason = first_result_refusal(call)
    if reason is not None:
        return reason
    if call.args["ceil_mode"] and not all(is_fixed(size) for size in call.shape("self")[2:]):
        return "ceil_mode over a symbolic size"
    return _images_refusal(call)


def _images_refusal(call: Call, name: str = "self") -> str | None:
    if call.node.target in _OF_LINES:
        return line_refusal(call, name)
    return None if call.rank(name) == 4 else "its input needs 4 dimensions"


def _avg_pool(emission: Emission, call: Call) -> None:
    args = call.args
    kernel, stride = _windows(call)
    padding = of_height_and_width(args["padding"], call.rank("self"), 0)
    divisor = args.get("divisor_override") or kernel[0] * kernel[1]
    value, sizes = image_of(emission, emission.of(args["self"]))
    shape = image_sizes(shape_of(call.node))
    beyond = (0, 0)
    if args["ceil_mode"]:
        beyond = _beyond(sizes, shape, kernel, stride, padding)
    # Neither torch nor the runtime counts what is beyond the padding.
    sides = (padding[0], padding[1] + beyond[1], padding[0] + beyond[0], padding[1])
    if any(padding) and (args["count_include_pad"] or args.get("divisor_override")):
        # The runtime divides by the number of true elements: make the padding true.
        amounts = (0, *padding, 0)
        wide = (*sizes[:2], sizes[2] + 2 * padding[0], sizes[3] + 2 * padding[1])
        value = padded(emission, value, wide, amounts, amounts, _LAST)
        sides = (0, beyond[1], beyond[0], 0)
    value = pool(
        *(emission, XnnOperator.AVG_POOLING_2D, value, shape),
        kernel=kernel,
        stride=stride,
        padding=sides,
    )
    if divisor != kernel[0] * kernel[1]:
        value = emission.add(
            XnnOperator.MULTIPLY,
            shape,
            _LAST,
            input1_id=value,
            input2_id=emission.id_of(emission.scalar(kernel[0] * kernel[1] / divisor)),
        )
    define_image(emission, call.node, value)


def _avg_pool_refusal(call: Call) -> str | None:
    reason = _images_refusal(call)
    if reason is not None or not call.args["ceil_mode"]:
        return reason
    sizes, shape = image_sizes(call.shape("self")), image_sizes(shape_of(call.node))
    if not all(isinstance(size, int) for size in (*sizes[2:], *shape[2:])):
        return "ceil_mode over symbolic sizes"
    padding = of_height_and_width(call.args["padding"], call.rank("self"), 0)
    if call.args.get("divisor_override") and any(_beyond(sizes, shape, *_windows(call), padding)):
        return "ceil_mode with a divisor, by which its last windows divide as well"
    return None


def _adaptive_pool(emission: Emission, call: Call) -> None:
    value, _ = image_of(emission, emission.of(call.args["self"]))
    shape = image_sizes(shape_of(call.node))
    if _adapted(call) == (1, 1):
        value = mean_of_images(emission, value, shape, _LAST)
    else:
        kernel = _adapted_kernel(call)
        value = pool(
            *(emission, XnnOperator.AVG_POOLING_2D, value, shape), kernel=kernel, stride=kernel
        )
    define_image(emission, call.node, value)


def _adapted(call: Call) -> Pair:
    return of_height_and_width(call.args["output_size"], call.rank("self"), 1)


def _adapted_kernel(call: Call) -> Pair:
    sizes, (height, width) = _adapted(call), image_sizes(call.shape("self"))[2:]
    return int(height) // sizes[0], int(width) // sizes[1]


def _adaptive_pool_refusal(call: Call) -> str | None:
    reason = _images_refusal(call)
    if reason is not None:
        return reason
    spatial, sizes = image_sizes(call.shape("self"))[2:], _adapted(call)
    if sizes != (1, 1):
        if not all(isinstance(size, int) for size in (*spatial, *sizes)):
            return "its sizes are symbolic"
        if any(size % wanted for size, wanted in zip(spatial, sizes, strict=True)):
            return "its windows are not all of one size"
    return None


def _resize(emission: Emission, call: Call) -> None:
    tracked = emission.of(call.args["input" if "input" in call.args else "self"])
    shape = shape_of(call.node)
    value = emission.add(
        XnnOperator.STATIC_RESIZE_BILINEAR_2D,
        shape,
        _LAST,
        new_height=int(shape[2]),
        new_width=int(shape[3]),
        input_id=emission.id_of(tracked, _LAST),
        flags=XnnNode.ALIGN_CORNERS if call.args["align_corners"] else 0,
    )
    emission.define_value(call.node, value, _LAST)


def _resize_refusal(call: Call) -> str | None:
    name = "input" if "input" in call.args else "self"
    before, after = call.shape(name)[2:], shape_of(call.node)[2:]
    if not all(isinstance(size, int) for size in (*before, *after)):
        return "its sizes are symbolic"
    factors = call.args.get("scale_factors") or [
        call.args.get("scales_h"),
        call.args.get("scales_w"),
    ]
    for size, wanted, factor in zip(before, after, factors, strict=True):
        # torch then steps by the factor it was given, the runtime by the ratio of the sizes
        if factor is not None and factor * size != wanted:
            return f"a size of {size} times {factor} is no whole number"
    return _images_refusal(call, name)


def _adaptive_int8_refusal(call: Call) -> str | None:
    if _adapted(call) != (1, 1):
        return "XNNPACK averages integers over whole images only"
    return None


def _resize_scale_refusal(call: Call, scales: Scales) -> str | None:
    # The runtime rounds between pixels to the input's scale: right only if the program does too.
    if rounded_after(call.node) != scales.result:
        return "its result is not quantised with its input's scale"
    return None


_MAX_POOL = Operator(_max_pool, _max_pool_refusal, integers=Integers.KEEPS, clamps=True)
_AVG_POOL = Operator(_avg_pool, _avg_pool_refusal, wide=True)
_ADAPTIVE = Operator(
    _adaptive_pool,
    _adaptive_pool_refusal,
    integers=Integers.CHOOSES,
    int8_refusal=_adaptive_int8_refusal,
    wide=True,
)
_RESIZE = Operator(
    _resize, _resize_refusal, integers=Integers.KEEPS, scale_refusal=_resize_scale_refusal
)
POOLING: Table = {
    _aten.max_pool2d.default: _MAX_POOL,
    _aten.max_pool2d_with_indices.default: _MAX_POOL,
    _aten.max_pool1d.default: _MAX_POOL,
    _aten.avg_pool1d.default: _AVG_POOL,
    _aten.avg_pool2d.default: _AVG_POOL,
    _aten.adaptive_avg_pool1d.default: _ADAPTIVE,
    _aten.adaptive_avg_pool2d.default: _ADAPTIVE,
    _aten._adaptive_avg_pool2d.default: _ADAPTIVE,
    _aten.upsample_bilinear2d.vec: _RESIZE,
    _aten.upsample_bilinear2d.default: _RESIZE,
}
