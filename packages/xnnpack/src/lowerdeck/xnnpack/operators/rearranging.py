"""Pixel and channel shuffles, and nearest resizing."""

from __future__ import annotations

from collections.abc import Sequence

from torch.types import IntLikeType as Dim

from lowerdeck.xnnpack.emit import Call, Emission, Tracked, joined, same_sizes
from lowerdeck.xnnpack.operators.contract import Table, first_of, fixed, move, one_symbol, table
from lowerdeck.xnnpack.operators.pooling import scale_factors
from lowerdeck.xnnpack.payload import Layout

_LAST = Layout.CHANNELS_LAST
_INTO_PIXELS = (0, 1, 4, 2, 5, 3)


def _split_permute_merge(
    e: Emission, x: Tracked, call: Call, apart: Sequence[Dim], order: Sequence[int]
) -> Tracked:
    """Split, permute and merge dimensions in memory order.

    Keeping the producer's layout avoids other data movement between convolutions.
    """
    layout, shape = x.preferred, call.result
    value = e.reshaped(e.id_of(x, layout), apart)
    value = e.permuted(value, order, [apart[axis] for axis in order])
    return e.tracked(shape, e.reshaped(value, layout.arrange(shape)), layout)


def _pixel_shuffle(e: Emission, x: Tracked, call: Call) -> Tracked:
    number, many, height, width = x.shape
    factor = int(call.args["upscale_factor"])
    channels = int(many) // factor**2
    apart = {
        Layout.PLAIN: (number, channels, factor, factor, height, width),
        _LAST: (number, height, width, channels, factor, factor),
    }
    return _split_permute_merge(e, x, call, apart[x.preferred], _INTO_PIXELS)


def _channel_shuffle(e: Emission, x: Tracked, call: Call) -> Tracked:
    number, channels, height, width = x.shape
    groups = int(call.args["groups"])
    group_channels = int(channels) // groups
    if x.preferred is _LAST:
        return _split_permute_merge(
            e, x, call, (number, height, width, groups, group_channels), (0, 1, 2, 4, 3)
        )
    return _split_permute_merge(
        e, x, call, (number, groups, group_channels, height, width), (0, 2, 1, 3, 4)
    )


def _nearest(e: Emission, x: Tracked, call: Call) -> Tracked:
    """Repeat each pixel along its row, then each row, by concatenation."""
    number, channels, height, width = x.shape
    *_, rows, columns = call.result
    with e.made_as(x.encoding if e.writes.is_int8 else None):
        pixels = e.tracked((number, height, width, channels), e.id_of(x, _LAST))
        wide = joined(e, [pixels] * _factor(width, columns), 3)
        wide = e.view(wide, (number, height, columns * channels))
        tall = joined(e, [wide] * _factor(height, rows), 2)
    value = e.reshaped(e.id_of(tall), (number, rows, columns, channels))
    return e.tracked(call.result, value, _LAST)


def _factor(before: Dim, after: Dim) -> int:
    """Return the integer factor of a resize, from 1 to 5; 0 otherwise."""
    return next((times for times in range(1, 6) if same_sizes([before * times], [after])), 0)


def _rank_refusal(call: Call) -> str | None:
    return None if call.rank() == 4 else "its input needs 4 dimensions"


_CHANNELS = fixed(lambda call: call.shape()[1:2], "its channels are symbolic")
_IMAGES = first_of(_rank_refusal, one_symbol, _CHANNELS)


def _nearest_refusal(call: Call) -> str | None:
    before, after = call.shape()[2:], call.result[2:]
    # Compare sizes and factors: a factor of 2.5 may double the size without doubling each pixel.
    for size, target, scale in zip(before, after, scale_factors(call), strict=True):
        times = _factor(size, target)
        if not times or scale not in (None, times):
            return "it does not repeat each pixel 1 to 5 times"
    return None


REARRANGING: Table = table(
    {
        "pixel_shuffle": move(_pixel_shuffle, _IMAGES),
        "channel_shuffle": move(_channel_shuffle, _IMAGES),
        "upsample_nearest2d upsample_nearest2d.vec": move(_nearest, _IMAGES, _nearest_refusal),
    }
)
