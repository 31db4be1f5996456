"""1-D to 3-D pools, and resizing.

A 3-D pool is one over height and width, and another over depth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.types import IntLikeType as Dim

from lowerdeck.serializer import XnnNode, XnnOperator
from lowerdeck.xnnpack.emit import Call, Emission, Tracked, is_fixed
from lowerdeck.xnnpack.operators.contract import Integers, Scales, Table, fixed, function, table
from lowerdeck.xnnpack.operators.images import (
    Window,
    from_image,
    image_of,
    image_sizes,
    line_refusal,
    mean_of_images,
    pool,
    spatial,
    volume_refusal,
)
from lowerdeck.xnnpack.operators.reductions import mean_over
from lowerdeck.xnnpack.operators.storage import rounded_after
from lowerdeck.xnnpack.payload import Layout

_aten = torch.ops.aten
_LAST = Layout.CHANNELS_LAST
_MAX, _AVERAGE = XnnOperator.MAX_POOLING_2D, XnnOperator.AVG_POOLING_2D
_OF_LINES = frozenset(
    {_aten.max_pool1d.default, _aten.avg_pool1d.default, _aten.adaptive_avg_pool1d.default}
)


def _windows(call: Call) -> list[Window]:
    """Return the windows of a pool along each dimension; lines are images of one row."""
    args, rank = call.args, call.rank("self")
    padding = spatial(args["padding"], rank, 0)
    windows = [
        Window(kernel, stride, pad, pad, dilation)
        for kernel, stride, pad, dilation in zip(
            spatial(args["kernel_size"], rank, 1),
            spatial(args["stride"] or args["kernel_size"], rank, 1),
            padding,
            spatial(args.get("dilation", 1), rank, 1),
            strict=True,
        )
    ]
    if not args["ceil_mode"]:
        return windows
    # With ceil_mode the last windows may extend beyond the padding.
    before = image_sizes(call.shape("self"))[2:]
    after = image_sizes(call.result)[2:]
    return [
        window._replace(
            after=max(window.after, _span(window, int(many)) - int(size) - window.before)
        )
        for window, size, many in zip(windows, before, after, strict=True)
    ]


def _span(window: Window, many: int) -> int:
    """Return the number of elements that the windows span."""
    return (many - 1) * window.stride + window.dilation * (window.kernel - 1) + 1


def _max_pool(e: Emission, x: Tracked, call: Call) -> Tracked:
    image, (rows, columns) = image_of(e, x), _windows(call)
    image = pool(e, _MAX, image, image_sizes(call.result), rows, columns, call.limits)
    return from_image(e, image, call.result)


_CEIL = fixed(
    lambda call: call.shape()[2:] if call.args["ceil_mode"] else (),
    "it has ceil_mode over a symbolic size",
)


def _images_refusal(call: Call) -> str | None:
    if call.node.target in _OF_LINES:
        return line_refusal(call)
    return None if call.rank() == 4 else "its input needs 4 dimensions"


def _avg_pool(e: Emission, x: Tracked, call: Call) -> Tracked:
    args, shape = call.args, call.result
    rows, columns = _windows(call)
    image = image_of(e, x)
    # Neither torch nor the runtime counts elements beyond the padding.
    if args["count_include_pad"] and (rows.before or columns.before):
        # The runtime excludes padding from the divisor: pad explicitly.
        amounts = (0, 0, rows.before, columns.before)
        image = e.padded(image, amounts, amounts)
        rows, columns = (
            window._replace(before=0, after=window.after - window.before)
            for window in (rows, columns)
        )
    image = pool(e, _AVERAGE, image, image_sizes(shape), rows, columns)
    return from_image(e, image, shape)


def _divisor_refusal(call: Call) -> str | None:
    overridden = call.args.get("divisor_override")
    return "its divisor is not the number of elements" if overridden else None


def _adaptive_pool(e: Emission, x: Tracked, call: Call) -> Tracked:
    image, shape = image_of(e, x), call.result
    sizes = _adapted(call)
    if sizes == (1, 1):
        image = mean_of_images(e, image.ids[_LAST], image_sizes(shape), _LAST)
    else:
        kernels = [int(size) // many for size, many in zip(image.shape[2:], sizes, strict=True)]
        rows, columns = (Window(kernel, kernel) for kernel in kernels)
        image = pool(e, _AVERAGE, image, image_sizes(shape), rows, columns)
    return from_image(e, image, shape)


def _adapted(call: Call) -> tuple[int, ...]:
    return spatial(call.args["output_size"], call.rank("self"), 1)


def _adaptive_refusal(call: Call) -> str | None:
    sizes, targets = image_sizes(call.shape())[2:], _adapted(call)
    if targets == (1, 1):
        return None
    if not all(map(is_fixed, (*sizes, *targets))):
        return "its sizes are symbolic"
    uneven = any(int(size) % many for size, many in zip(sizes, targets, strict=True))
    return "its windows are not all of one size" if uneven else None


def _adaptive_int8_refusal(call: Call) -> str | None:
    whole = _adapted(call) == (1, 1)
    return None if whole else "XNNPACK averages integers over whole images only"


def _volume_pool(e: Emission, x: Tracked, call: Call) -> Tracked:
    depth, rows, columns = _windows(call)
    batch, channels, *sizes = x.shape
    targets = [int(size) for size in call.result[2:]]
    value = e.id_of(x, _LAST)

    def pooled(before: Sequence[Dim], after: Sequence[int], many: Dim, *ways: Window) -> int:
        """Pool several images per batch element."""
        shape = (batch * many, channels, *before)
        image = e.tracked(shape, e.reshaped(value, _LAST.arrange(shape)), _LAST)
        shape = (batch * many, channels, *after)
        return pool(e, _MAX, image, shape, ways[0], ways[1], call.limits).ids[_LAST]

    if _is_window(rows, columns):
        value = pooled(sizes[1:], targets[1:], sizes[0], rows, columns)
    if _is_window(depth):
        area = math.prod(targets[1:])
        value = pooled((sizes[0], area), (targets[0], area), 1, depth, Window())
    shape = (batch, channels, *targets)
    return e.tracked(shape, e.reshaped(value, _LAST.arrange(shape)), _LAST)


def _is_window(*windows: Window) -> bool:
    return any(window.kernel > 1 or window.stride > 1 for window in windows)


def _volume_pool_refusal(call: Call) -> str | None:
    depth, *plane = _windows(call)
    alone = [depth.kernel == 1, all(window.kernel == 1 for window in plane)]
    steps = [depth.stride > 1, any(window.stride > 1 for window in plane)]
    if all(alone) or any(single and step for single, step in zip(alone, steps, strict=True)):
        return "it has windows of one element, which XNNPACK does not pool"
    return None


def _volume_mean_refusal(call: Call) -> str | None:
    whole = _adapted(call) == (1, 1, 1)
    return None if whole else "its window is not the whole volume"


def _resize(e: Emission, x: Tracked, call: Call) -> Tracked:
    shape = call.result
    return e.unary(
        XnnOperator.STATIC_RESIZE_BILINEAR_2D,
        x,
        shape=shape,
        layout=_LAST,
        new_height=int(shape[2]),
        new_width=int(shape[3]),
        flags=XnnNode.ALIGN_CORNERS if call.args["align_corners"] else 0,
    )


def _factor_refusal(call: Call) -> str | None:
    before, after = call.shape()[2:], call.result[2:]
    for size, target, factor in zip(before, after, scale_factors(call), strict=True):
        # torch scales by its factor argument, the runtime by the ratio of the sizes
        if factor is not None and factor * size != target:
            return f"a size of {size} times {factor} is not an integer"
    return None


def scale_factors(call: Call) -> Sequence[float | None]:
    """Return an upsampling's scale factors of height and width, or None."""
    args = call.args
    return args.get("scale_factors") or (args.get("scales_h"), args.get("scales_w"))


def _resize_scale_refusal(call: Call, scales: Scales) -> str | None:
    # The runtime rounds interpolated pixels to the input's scale: correct only if the program does
    # too.
    if rounded_after(call.node) != scales.result:
        return "its result is not quantised with its input's scale"
    return None


_SIZES = fixed(lambda call: (*call.shape()[2:], *call.result[2:]), "its sizes are symbolic")
POOLING: Table = table(
    {
        "max_pool1d max_pool2d max_pool2d_with_indices": function(
            _max_pool, _images_refusal, _CEIL, integers=Integers.KEEPS, clamps=True
        ),
        "avg_pool1d avg_pool2d": function(
            _avg_pool, _images_refusal, _CEIL, _divisor_refusal, wide=True
        ),
        "adaptive_avg_pool1d adaptive_avg_pool2d _adaptive_avg_pool2d": function(
            _adaptive_pool,
            _images_refusal,
            _adaptive_refusal,
            integers=Integers.CHOOSES,
            int8_refusal=_adaptive_int8_refusal,
            wide=True,
        ),
        "max_pool3d max_pool3d_with_indices": function(
            _volume_pool, volume_refusal, _volume_pool_refusal, clamps=True
        ),
        "adaptive_avg_pool3d _adaptive_avg_pool3d": function(
            lambda e, x, _: mean_over(e, x, (2, 3, 4), keep=True),
            volume_refusal,
            _volume_mean_refusal,
            wide=True,
        ),
        "upsample_bilinear2d.vec upsample_bilinear2d": function(
            _resize,
            _SIZES,
            _factor_refusal,
            _images_refusal,
            integers=Integers.KEEPS,
            scale_refusal=_resize_scale_refusal,
        ),
    }
)
