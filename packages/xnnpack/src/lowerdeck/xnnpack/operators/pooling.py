"""Pools over height and width, and resizing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.types import IntLikeType as Dim

from lowerdeck.xnnpack.emit.arguments import Call, is_fixed, pair, shape_of
from lowerdeck.xnnpack.emit.emission import Emission
from lowerdeck.xnnpack.operators.clamps import following_clamp
from lowerdeck.xnnpack.operators.contract import Integers, Operator, Scales, Table
from lowerdeck.xnnpack.operators.first_result import (
    first_result,
    first_result_refusal,
)
from lowerdeck.xnnpack.operators.storage import rounded_after
from lowerdeck.xnnpack.payload.layout import Layout
from lowerdeck.xnnpack.payload.schema import ALIGN_CORNERS, KEEP_DIMS, NodeKind

_aten = torch.ops.aten
_LAST = Layout.CHANNELS_LAST
_Pair = tuple[int, int]


def _pool(
    emission: Emission,
    kind: NodeKind,
    value: int,
    shape: Sequence[Dim],
    *,
    kernel: _Pair,
    stride: _Pair,
    padding: tuple[int, int, int, int] = (0, 0, 0, 0),
    dilation: _Pair = (1, 1),
    limits: tuple[float, float] | None = None,
) -> int:
    top, right, bottom, left = padding
    return emission.add(
        kind,
        shape,
        _LAST,
        limits,
        padding_top=top,
        padding_right=right,
        padding_bottom=bottom,
        padding_left=left,
        pooling_height=kernel[0],
        pooling_width=kernel[1],
        stride_height=stride[0],
        stride_width=stride[1],
        dilation_height=dilation[0],
        dilation_width=dilation[1],
        input_id=value,
    )


def _max_pool(emission: Emission, call: Call) -> None:
    args = call.args
    result = first_result(call.node)
    kernel, padding, dilation = (
        pair(args[name]) for name in ("kernel_size", "padding", "dilation")
    )
    stride = pair(args["stride"] or kernel)
    tracked, shape = emission.of(args["self"]), shape_of(result)
    ends = list(padding)
    if args["ceil_mode"]:
        # The last window may reach beyond the padding: pad by what it needs.
        for axis in (0, 1):
            reach = (int(shape[2 + axis]) - 1) * stride[axis] + dilation[axis] * (kernel[axis] - 1)
            ends[axis] = max(
                padding[axis], reach + 1 - int(tracked.shape[2 + axis]) - padding[axis]
            )
    last, limits = following_clamp(result)
    value = _pool(
        emission,
        NodeKind.MAX_POOLING_2D,
        emission.id_of(tracked, _LAST),
        shape,
        kernel=kernel,
        stride=stride,
        padding=(padding[0], ends[1], ends[0], padding[1]),
        dilation=dilation,
        limits=limits,
    )
    emission.define_value(last, value, _LAST)


def _max_pool_refusal(call: Call) -> str | None:
    reason = first_result_refusal(call)
    if reason is not None:
        return reason
    if call.args["ceil_mode"] and not all(is_fixed(size) for size in call.shape("self")[2:]):
        return "ceil_mode over a symbolic size"
    return _needs_images(call)


def _needs_images(call: Call, name: str = "self") -> str | None:
    return None if call.rank(name) == 4 else "its input needs 4 dimensions"


def _avg_pool(emission: Emission, call: Call) -> None:
    args = call.args
    kernel, padding = pair(args["kernel_size"]), pair(args["padding"])
    stride = pair(args["stride"] or kernel)
    tracked = emission.of(args["self"])
    shape = shape_of(call.node)
    value = emission.id_of(tracked, _LAST)
    sides = (padding[0], padding[1], padding[0], padding[1])
    if any(padding) and (args["count_include_pad"] or args["divisor_override"]):
        # The runtime divides by the number of true elements: make the padding true.
        value = _padded(emission, value, tracked.shape, padding)
        sides = (0, 0, 0, 0)
    value = _pool(
        *(emission, NodeKind.AVG_POOLING_2D, value, shape),
        kernel=kernel,
        stride=stride,
        padding=sides,
    )
    if args["divisor_override"]:
        factor = kernel[0] * kernel[1] / args["divisor_override"]
        value = emission.add(
            NodeKind.MULTIPLY,
            shape,
            _LAST,
            input1_id=value,
            input2_id=emission.id_of(emission.scalar(factor)),
        )
    emission.define_value(call.node, value, _LAST)


def _padded(emission: Emission, value: int, shape: Sequence[Dim], padding: _Pair) -> int:
    amounts = (0, *padding, 0)
    wide = (*shape[:2], shape[2] + 2 * padding[0], shape[3] + 2 * padding[1])
    return emission.add(
        NodeKind.STATIC_CONSTANT_PAD,
        wide,
        _LAST,
        pre_paddings=amounts,
        post_paddings=amounts,
        input_id=value,
    )


def _avg_pool_refusal(call: Call) -> str | None:
    if call.args["ceil_mode"]:
        return "ceil_mode, whose last windows divide by another number"
    return _needs_images(call)


def _adaptive_pool(emission: Emission, call: Call) -> None:
    tracked = emission.of(call.args["self"])
    shape = shape_of(call.node)
    value = emission.id_of(tracked, _LAST)
    sizes = pair(call.args["output_size"])
    if sizes == (1, 1):
        value = emission.add(
            NodeKind.GLOBAL_AVG_POOLING_2D, shape, _LAST, input_id=value, flags=KEEP_DIMS
        )
    else:
        kernel = (int(tracked.shape[2]) // sizes[0], int(tracked.shape[3]) // sizes[1])
        value = _pool(
            *(emission, NodeKind.AVG_POOLING_2D, value, shape), kernel=kernel, stride=kernel
        )
    emission.define_value(call.node, value, _LAST)


def _adaptive_pool_refusal(call: Call) -> str | None:
    shape = call.shape("self")
    sizes = pair(call.args["output_size"])
    if len(shape) == 4 and sizes != (1, 1):
        if not all(isinstance(size, int) for size in (*shape[2:], *sizes)):
            return "its sizes are symbolic"
        if any(size % wanted for size, wanted in zip(shape[2:], sizes, strict=True)):
            return "its windows are not all of one size"
    return _needs_images(call)


def _resize(emission: Emission, call: Call) -> None:
    tracked = emission.of(call.args["input" if "input" in call.args else "self"])
    shape = shape_of(call.node)
    value = emission.add(
        NodeKind.STATIC_RESIZE_BILINEAR_2D,
        shape,
        _LAST,
        new_height=int(shape[2]),
        new_width=int(shape[3]),
        input_id=emission.id_of(tracked, _LAST),
        flags=ALIGN_CORNERS if call.args["align_corners"] else 0,
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
    return _needs_images(call, name)


def _adaptive_int8_refusal(call: Call) -> str | None:
    if pair(call.args["output_size"]) != (1, 1):
        return "XNNPACK averages integers over whole images only"
    return None


def _resize_scale_refusal(call: Call, scales: Scales) -> str | None:
    # The runtime rounds between pixels to the input's scale: right only if the program does too.
    if rounded_after(call.node) != scales.result:
        return "its result is not quantised with its input's scale"
    return None


_MAX_POOL = Operator(_max_pool, _max_pool_refusal, integers=Integers.KEEPS, clamps=True)
_ADAPTIVE = Operator(
    _adaptive_pool,
    _adaptive_pool_refusal,
    integers=Integers.CHOOSES,
    int8_refusal=_adaptive_int8_refusal,
)
_RESIZE = Operator(
    _resize, _resize_refusal, integers=Integers.KEEPS, scale_refusal=_resize_scale_refusal
)
POOLING: Table = {
    _aten.max_pool2d.default: _MAX_POOL,
    _aten.max_pool2d_with_indices.default: _MAX_POOL,
    _aten.avg_pool2d.default: Operator(_avg_pool, _avg_pool_refusal),
    _aten.adaptive_avg_pool2d.default: _ADAPTIVE,
    _aten._adaptive_avg_pool2d.default: _ADAPTIVE,
    _aten.upsample_bilinear2d.vec: _RESIZE,
    _aten.upsample_bilinear2d.default: _RESIZE,
}
