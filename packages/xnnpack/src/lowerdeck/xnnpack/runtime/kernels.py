"""Reference kernels of the nodes in torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)

from lowerdeck.serializer import XnnNode, XnnOperator
from lowerdeck.xnnpack.errors import DelegateRunError

Tensor = torch.Tensor
Fields: TypeAlias = Mapping[str, Any]
Kernel: TypeAlias = Callable[[Fields, Sequence[Tensor]], Tensor]
MOST_ELEMENTS = 2**31


def bounded(*sizes: int) -> None:
    """Raise ``DelegateRunError`` for a result that is too large to allocate."""
    if math.prod(max(size, 0) for size in sizes) > MOST_ELEMENTS:
        raise DelegateRunError(f"a result of sizes {list(sizes)} exceeds {MOST_ELEMENTS} elements")


def _pixels(value: Tensor) -> Tensor:
    """Return an image as N, C, H, W."""
    if value.dim() != 4:
        raise DelegateRunError(f"found {value.dim()} dimensions, expected 4")
    return value.permute(0, 3, 1, 2)


def _memory(value: Tensor) -> Tensor:
    """Return an image as N, H, W, C."""
    return value.permute(0, 2, 3, 1).contiguous()


def _broadcast(*shapes: torch.Size) -> torch.Size:
    shape: torch.Size = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    return shape


def _two(fields: Fields, name: str) -> tuple[int, int]:
    pair = (int(fields[f"{name}_height"]), int(fields[f"{name}_width"]))
    bounded(*pair)
    return pair


def _sides(fields: Fields) -> tuple[int, int, int, int]:
    """Return the padding in the order of ``torch.nn.functional.pad``."""
    left, right, top, bottom = (
        int(fields[f"padding_{side}"]) for side in ("left", "right", "top", "bottom")
    )
    return left, right, top, bottom


def _padded(value: Tensor, fields: Fields, filler: float = 0.0) -> Tensor:
    left, right, top, bottom = _sides(fields)
    batch, channels, height, width = value.shape
    bounded(batch, channels, height + top + bottom, width + left + right)
    return F.pad(value, (left, right, top, bottom), value=filler)


def _fully_connected(fields: Fields, inputs: Sequence[Tensor]) -> Tensor:
    value, filters, *bias = inputs
    bounded(*value.shape[:-1], *filters.shape)
    matrix = filters.t() if fields["flags"] & XnnNode.TRANSPOSE_WEIGHTS else filters
    return F.linear(value, matrix, bias[0].reshape(-1) if bias else None)


def _convolution(fields: Fields, inputs: Sequence[Tensor]) -> Tensor:
    value, filters, *bias = inputs
    padded = _padded(_pixels(value), fields)
    bounded(padded.shape[0], filters.shape[0], *padded.shape[2:])
    return _memory(
        torch.conv2d(
            padded,
            filters.permute(0, 3, 1, 2),
            bias[0] if bias else None,
            _two(fields, "subsampling"),
            0,
            _two(fields, "dilation"),
            int(fields["groups"]),
        )
    )


def _depthwise(fields: Fields, inputs: Sequence[Tensor]) -> Tensor:
    value, filters, *bias = inputs
    return _convolution(fields, [value, filters.permute(3, 1, 2, 0), *bias])


def _transposed(fields: Fields, inputs: Sequence[Tensor]) -> Tensor:
    value, filters, *bias = inputs
    groups, stride = int(fields["groups"]), _two(fields, "subsampling")
    channels, height, width, per_group = filters.shape
    if not groups:
        raise DelegateRunError("a convolution with 0 groups")
    weight = filters.reshape(groups, channels // groups, height, width, per_group)
    weight = weight.permute(0, 4, 1, 2, 3).reshape(-1, channels // groups, height, width)
    pixels = _pixels(value)
    dilation = _two(fields, "dilation")
    bounded(
        pixels.shape[0],
        channels,
        pixels.shape[2] * stride[0] + height * dilation[0],
        pixels.shape[3] * stride[1] + width * dilation[1],
    )
    whole = F.conv_transpose2d(
        *(pixels, weight, bias[0] if bias else None, stride, 0),
        *(_two(fields, "adjustment"), groups, dilation),
    )
    left, right, top, bottom = _sides(fields)
    return _memory(whole[:, :, top : whole.shape[2] - bottom, left : whole.shape[3] - right])


def _max_pool(fields: Fields, inputs: Sequence[Tensor]) -> Tensor:
    padded = _padded(_pixels(inputs[0]), fields, -math.inf)
    return _memory(
        F.max_pool2d(
            padded,
            _two(fields, "pooling"),
            _two(fields, "stride"),
            dilation=_two(fields, "dilation"),
        )
    )


def _avg_pool(fields: Fields, inputs: Sequence[Tensor]) -> Tensor:
    # The mean excludes padding.
    window, stride = _two(fields, "pooling"), _two(fields, "stride")
    pixels = _pixels(inputs[0])
    total = F.avg_pool2d(_padded(pixels, fields), window, stride)
    share = F.avg_pool2d(_padded(torch.ones_like(pixels[:1, :1]), fields), window, stride)
    return _memory(total / share)


def _global_avg_pool(fields: Fields, inputs: Sequence[Tensor]) -> Tensor:
    return inputs[0].mean((-3, -2), keepdim=bool(fields["flags"] & XnnNode.KEEP_DIMS))


def _resize(fields: Fields, inputs: Sequence[Tensor]) -> Tensor:
    size = (int(fields["new_height"]), int(fields["new_width"]))
    pixels = _pixels(inputs[0])
    bounded(*pixels.shape[:2], *size)
    return _memory(
        F.interpolate(
            pixels,
            size,
            mode="bilinear",
            align_corners=bool(fields["flags"] & XnnNode.ALIGN_CORNERS),
        )
    )


def _reshape(fields: Fields, inputs: Sequence[Tensor]) -> Tensor:
    return inputs[0].reshape([size or -1 for size in fields["new_shape"]])


def _transpose(fields: Fields, inputs: Sequence[Tensor]) -> Tensor:
    return inputs[0].permute(*fields["perm"]).contiguous()


def _slice(fields: Fields, inputs: Sequence[Tensor]) -> Tensor:
    value, offsets, sizes = inputs[0], fields["offsets"], fields["sizes"]
    if not value.dim() == len(offsets) == len(sizes):
        raise DelegateRunError(
            f"{len(offsets)} offsets and {len(sizes)} sizes for {value.dim()} dimensions"
        )
    for axis, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        value = value.narrow(axis, offset, size or value.shape[axis])
    return value.contiguous()


def _constant_pad(fields: Fields, inputs: Sequence[Tensor]) -> Tensor:
    value, before, after = inputs[0], fields["pre_paddings"], fields["post_paddings"]
    if not value.dim() == len(before) == len(after):
        raise DelegateRunError(
            f"found padding of {len(before)} dimensions, expected {value.dim()}"
        )
    sides = list(zip(before, after, strict=True))
    bounded(*(size + sum(pair) for size, pair in zip(value.shape, sides, strict=True)))
    amounts = [amount for pair in reversed(sides) for amount in pair]
    return F.pad(value, amounts, value=float(fields["padding_value"]))


def _concatenate(fields: Fields, inputs: Sequence[Tensor]) -> Tensor:
    axis = int(fields["axis"])
    return torch.cat(list(inputs), dim=axis - 2**32 if axis >= 2**31 else axis)


def _matrix_product(fields: Fields, inputs: Sequence[Tensor]) -> Tensor:
    left, right = inputs
    right = right.transpose(-1, -2) if fields["flags"] & XnnNode.TRANSPOSE_WEIGHTS else right
    bounded(*_broadcast(left.shape[:-2], right.shape[:-2]), left.shape[-2], right.shape[-1])
    return torch.matmul(left, right)


def _unary(function: Callable[[Tensor], Tensor]) -> Kernel:
    return lambda _, inputs: function(inputs[0])


def _binary(function: Callable[[Tensor, Tensor], Tensor]) -> Kernel:
    def kernel(_: Fields, inputs: Sequence[Tensor]) -> Tensor:
        left, right = inputs
        bounded(*_broadcast(left.shape, right.shape))
        return function(left, right)

    return kernel


_UNARY: Mapping[XnnOperator, Callable[[Tensor], Tensor]] = {
    **{
        XnnOperator[name.upper()]: getattr(torch, name)
        for name in ("abs", "cos", "exp", "floor", "log", "sigmoid", "sin", "square", "tanh")
    },
    **dict.fromkeys((XnnOperator.CLAMP, XnnOperator.CONVERT, XnnOperator.COPY), torch.clone),
    XnnOperator.CEILING: torch.ceil,
    XnnOperator.GELU: F.gelu,
    XnnOperator.HARDSWISH: F.hardswish,
    XnnOperator.NEGATE: torch.neg,
    XnnOperator.RECIPROCAL_SQUARE_ROOT: torch.rsqrt,
    XnnOperator.SOFTMAX: lambda value: torch.softmax(value, -1),
    XnnOperator.SQUARE_ROOT: torch.sqrt,
}
_BINARY: Mapping[XnnOperator, Callable[[Tensor, Tensor], Tensor]] = {
    XnnOperator.ADD: torch.add,
    XnnOperator.DIV: torch.div,
    XnnOperator.MAXIMUM: torch.maximum,
    XnnOperator.MINIMUM: torch.minimum,
    XnnOperator.MULTIPLY: torch.mul,
    XnnOperator.PRELU: lambda value, slope: torch.where(value > 0, value, value * slope),
    XnnOperator.SUBTRACT: torch.sub,
}
_WINDOWS: Mapping[XnnOperator, Kernel] = {
    XnnOperator.AVG_POOLING_2D: _avg_pool,
    XnnOperator.CONV2D: _convolution,
    XnnOperator.CONV_TRANSPOSE_2D: _transposed,
    XnnOperator.DEPTHWISE_CONV2D: _depthwise,
    XnnOperator.FULLY_CONNECTED: _fully_connected,
    XnnOperator.GLOBAL_AVG_POOLING_2D: _global_avg_pool,
    XnnOperator.MAX_POOLING_2D: _max_pool,
}
KERNELS: Mapping[XnnOperator, Kernel] = {
    **{kind: _unary(function) for kind, function in _UNARY.items()},
    **{kind: _binary(function) for kind, function in _BINARY.items()},
    **_WINDOWS,
    XnnOperator.BATCH_MATRIX_MULTIPLY: _matrix_product,
    XnnOperator.ELU: lambda fields, inputs: F.elu(inputs[0], float(fields["alpha"])),
    XnnOperator.LEAKY_RELU: lambda fields, inputs: F.leaky_relu(
        inputs[0], float(fields["negative_slope"])
    ),
    XnnOperator.STATIC_CONSTANT_PAD: _constant_pad,
    XnnOperator.STATIC_RESHAPE: _reshape,
    XnnOperator.STATIC_RESIZE_BILINEAR_2D: _resize,
    XnnOperator.STATIC_SLICE: _slice,
    XnnOperator.STATIC_TRANSPOSE: _transpose,
    **dict.fromkeys([one for one in XnnOperator if one.joined], _concatenate),
}
_CLAMPING = (XnnOperator.ADD, XnnOperator.SUBTRACT, XnnOperator.MULTIPLY, XnnOperator.DIV)
IGNORE_RANGE = frozenset(KERNELS) - {*_CLAMPING, XnnOperator.CLAMP, *_WINDOWS}
"""Node kinds whose output range the official runtime ignores."""
