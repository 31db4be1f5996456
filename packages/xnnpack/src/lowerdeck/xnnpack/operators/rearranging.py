"""What moves pixels into channels and back, mixes channels, and repeats pixels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.types import IntLikeType as Dim

from lowerdeck.xnnpack.emit import Call, Emission, is_fixed, joined, shape_of, symbols_refusal
from lowerdeck.xnnpack.operators.contract import Table, move
from lowerdeck.xnnpack.payload.layout import Layout

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
    with emission.made_as(tracked.encoding if emission.writes.is_int8 else None):
        pixels = emission.tracked(
            (number, height, width, channels), emission.id_of(tracked, _LAST)
        )
        wide = joined(emission, [pixels] * _factor(width, columns), 3)
        wide = emission.view(wide, (number, height, columns * channels))
        tall = joined(emission, [wide] * _factor(height, rows), 2)
    value = emission.reshaped(emission.id_of(tall), (number, rows, columns, channels))
    emission.define_value(call.node, value, _LAST)


def _factor(before: Dim, after: Dim) -> int:
    """Return how often a size is repeated; 0 where that is no number of 1 to 5."""
    return next((times for times in range(1, 6) if str(before * times) == str(after)), 0)


def _images_refusal(call: Call, name: str = "self") -> str | None:
    shape = call.shape(name)
    if len(shape) != 4:
        return "its input needs 4 dimensions"
    return symbols_refusal(shape) or (None if is_fixed(shape[1]) else "its channels are symbolic")


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


_NEAREST = move(_nearest, _nearest_refusal)
REARRANGING: Table = {
    _aten.pixel_shuffle.default: move(_pixel_shuffle, _images_refusal),
    _aten.pixel_unshuffle.default: move(_pixel_unshuffle, _images_refusal),
    _aten.channel_shuffle.default: move(_channel_shuffle, _images_refusal),
    _aten.upsample_nearest2d.vec: _NEAREST,
    _aten.upsample_nearest2d.default: _NEAREST,
}
