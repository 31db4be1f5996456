"""What moves pixels into channels and back, mixes channels, and repeats pixels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.types import IntLikeType as Dim

from lowerdeck.xnnpack.emit import Call, Emission, Fields, is_fixed, shape_of
from lowerdeck.xnnpack.operators.contract import Integers, Operator, Table
from lowerdeck.xnnpack.payload.layout import Layout
from lowerdeck.xnnpack.payload.schema import CONCATENATE_KINDS

_aten = torch.ops.aten
_LAST = Layout.CHANNELS_LAST
_INTO_PIXELS = (0, 1, 4, 2, 5, 3)
_INTO_CHANNELS = (0, 1, 3, 5, 2, 4)


def _permuted_apart(
    emission: Emission, call: Call, layout: Layout, apart: Sequence[Dim], order: Sequence[int]
) -> None:
    """Take dimensions apart, permute them and join them, in the order of memory.

    The layout is that in which the tensor came to be, so that between convolutions nothing but
    this one permutation moves a byte.
    """
    value = emission.reshaped(emission.id_of(emission.of(call.args["self"]), layout), apart)
    value = emission.permuted(value, order, [apart[axis] for axis in order])
    value = emission.reshaped(value, layout.arrange(shape_of(call.node)))
    emission.define_value(call.node, value, layout)


def _pixel_shuffle(emission: Emission, call: Call) -> None:
    layout = emission.of(call.args["self"]).preferred
    number, many, height, width = call.shape("self")
    factor = int(call.args["upscale_factor"])
    channels = int(many) // factor**2
    apart = {
        Layout.PLAIN: (number, channels, factor, factor, height, width),
        Layout.CHANNELS_LAST: (number, height, width, channels, factor, factor),
    }
    _permuted_apart(emission, call, layout, apart[layout], _INTO_PIXELS)


def _pixel_unshuffle(emission: Emission, call: Call) -> None:
    layout = emission.of(call.args["self"]).preferred
    number, channels, _, _ = call.shape("self")
    *_, height, width = shape_of(call.node)
    factor = int(call.args["downscale_factor"])
    apart = {
        Layout.PLAIN: (number, channels, height, factor, width, factor),
        Layout.CHANNELS_LAST: (number, height, factor, width, factor, channels),
    }
    _permuted_apart(emission, call, layout, apart[layout], _INTO_CHANNELS)


def _channel_shuffle(emission: Emission, call: Call) -> None:
    layout = emission.of(call.args["self"]).preferred
    number, channels, height, width = call.shape("self")
    groups = int(call.args["groups"])
    each = int(channels) // groups
    apart: tuple[Dim, ...] = (number, groups, each, height, width)
    order = (0, 2, 1, 3, 4)
    if layout is Layout.CHANNELS_LAST:
        apart, order = (number, height, width, groups, each), (0, 1, 2, 4, 3)
    _permuted_apart(emission, call, layout, apart, order)


def _nearest(emission: Emission, call: Call) -> None:
    """Repeat each pixel along its row, then each row: both are joins of what lies in a row."""
    tracked = emission.of(call.args["input" if "input" in call.args else "self"])
    number, channels, height, width = tracked.shape
    *_, rows, columns = shape_of(call.node)
    value = emission.id_of(tracked, _LAST)
    value = _joined(emission, value, (number, height, width, channels), _factor(width, columns))
    value = emission.reshaped(value, (number, height, columns * channels))
    value = _joined(emission, value, (number, height, columns * channels), _factor(height, rows))
    value = emission.reshaped(value, (number, rows, columns, channels))
    emission.define_value(call.node, value, _LAST)


def _joined(emission: Emission, value: int, shape: Sequence[Dim], times: int) -> int:
    """Return a value that is repeated along its last dimension."""
    if times == 1:
        return value
    inputs: dict[str, Fields] = {f"input{number}_id": value for number in range(1, times + 1)}
    wide = (*shape[:-1], shape[-1] * times)
    with emission.stored(None, emission.encoding_of(value)):
        return emission.add(
            CONCATENATE_KINDS[times - 2], wide, Layout.PLAIN, None, axis=len(shape) - 1, **inputs
        )


def _factor(before: Dim, after: Dim) -> int:
    """Return how often a size is repeated; 0 where that is no number of 1 to 5."""
    return next((times for times in range(1, 6) if str(before * times) == str(after)), 0)


def _images_refusal(call: Call, name: str = "self") -> str | None:
    shape = call.shape(name)
    if len(shape) != 4:
        return "its input needs 4 dimensions"
    if sum(not is_fixed(size) for size in shape) > 1:
        return "more than one symbolic size, which a reshape cannot carry"
    return None if is_fixed(shape[1]) else "its channels are symbolic"


def _nearest_refusal(call: Call) -> str | None:
    name = "input" if "input" in call.args else "self"
    reason = _images_refusal(call, name)
    if reason is not None:
        return reason
    before, after = call.shape(name)[2:], shape_of(call.node)[2:]
    # Sizes, since a factor of 2.5 may make twice as many pixels, but not each of them twice.
    scales = call.args.get("scale_factors") or [
        call.args.get("scales_h"),
        call.args.get("scales_w"),
    ]
    for size, wanted, scale in zip(before, after, scales, strict=True):
        times = _factor(size, wanted)
        if not times or scale not in (None, times):
            return "it does not repeat each pixel 1 to 5 times"
    return None


def _moving(
    emit: Callable[[Emission, Call], None], refusal: Callable[[Call], str | None] = _images_refusal
) -> Operator:
    return Operator(emit, refusal, computes=False, integers=Integers.KEEPS)


_NEAREST = _moving(_nearest, _nearest_refusal)
REARRANGING: Table = {
    _aten.pixel_shuffle.default: _moving(_pixel_shuffle),
    _aten.pixel_unshuffle.default: _moving(_pixel_unshuffle),
    _aten.channel_shuffle.default: _moving(_channel_shuffle),
    _aten.upsample_nearest2d.vec: _NEAREST,
    _aten.upsample_nearest2d.default: _NEAREST,
}
