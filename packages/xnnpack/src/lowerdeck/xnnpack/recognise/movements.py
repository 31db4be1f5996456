"""The pieces of what moves elements: shuffles, rolls, permutations, joins."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.types import IntLikeType as Dim

from lowerdeck.torch_base import arguments_of
from lowerdeck.xnnpack.emit import is_fixed, shape_of
from lowerdeck.xnnpack.recognise.matching import (
    Amount,
    Either,
    Match,
    Piece,
    is_empty,
    same_sizes,
)
from lowerdeck.xnnpack.recognise.pieces import (
    ADD,
    ANY,
    Arguments,
    Whole,
    X,
    order_of,
    turned,
    turns,
    view,
)

_aten = torch.ops.aten


def _image(match: Match) -> list[int] | None:
    """Return the channels, height and width of images that come apart and together again."""
    shapes = [shape_of(match.found[name]) for name in ("x", "apart", "together")]
    x, apart, joined = shapes
    if len(x) != 4 or len(joined) != 4 or len(apart) < 5:
        return None
    if not all(same_sizes(one[:1], x[:1]) for one in shapes):
        return None
    if not all(is_fixed(size) and size > 0 for one in shapes for size in one[1:]):
        return None
    return [int(size) for size in x[1:]]


def _pixel_shuffle(match: Match) -> Arguments | None:
    channels, height, width = _image(match) or (0, 0, 0)
    factor = int(shape_of(match.found["apart"])[2]) if channels else 0
    if not factor or channels % factor**2:
        return None
    apart = (channels // factor**2, factor, factor, height, width)
    joined = (channels // factor**2, height * factor, width * factor)
    return (match.found["x"], factor) if _is_moved(match, apart, _OUT, joined) else None


def _pixel_unshuffle(match: Match) -> Arguments | None:
    channels, height, width = _image(match) or (0, 0, 0)
    factor = int(shape_of(match.found["apart"])[3]) if channels else 0
    if not factor or height % factor or width % factor:
        return None
    apart = (channels, height // factor, factor, width // factor, factor)
    joined = (channels * factor**2, height // factor, width // factor)
    return (match.found["x"], factor) if _is_moved(match, apart, _IN, joined) else None


def _channel_shuffle(match: Match) -> Arguments | None:
    channels, *size = _image(match) or (0, 0, 0)
    groups = int(shape_of(match.found["apart"])[1]) if channels else 0
    if not groups or channels % groups:
        return None
    apart = (groups, channels // groups, *size)
    moved = _is_moved(match, apart, (0, 2, 1, 3, 4), (channels, *size))
    return (match.found["x"], groups) if moved else None


def _is_moved(
    match: Match, apart: Sequence[Dim], order: Sequence[int], joined: Sequence[Dim]
) -> bool:
    return (
        same_sizes(shape_of(match.found["apart"])[1:], apart)
        and order_of(match.found["turned"]) == list(order)
        and same_sizes(shape_of(match.found["together"])[1:], joined)
    )


_OUT, _IN = (0, 1, 4, 2, 5, 3), (0, 1, 3, 5, 2, 4)
_MOVED = view(turned(view(X, "apart"), "turned"), "together")
PIXELS = (
    Whole(_aten.pixel_shuffle.default, _MOVED, _pixel_shuffle),
    Whole(_aten.pixel_unshuffle.default, _MOVED, _pixel_unshuffle),
    Whole(_aten.channel_shuffle.default, _MOVED, _channel_shuffle),
)


def _roll(match: Match) -> Arguments | None:
    x, axis, start, size = (match.found[name] for name in ("x", "axis", "start", "size"))
    shape = shape_of(x)
    axis = int(axis) % max(len(shape), 1)
    # An index that is not negative: the remainder of another would have its sign.
    if not shape or not same_sizes([shape[axis]], [int(size)]) or not 0 <= start <= size:
        return None
    if match.found["end"] != size or start != int(start):
        return None
    return (x, [-int(start)], [axis])


_COUNT = Either(
    Piece((_aten.arange.start_step,), 0, Amount("end")),
    Piece((_aten.arange.start,), 0, Amount("end")),
    Piece((_aten.arange.default,), Amount("end")),
)
_ROLLED = Piece((_aten.fmod.Scalar,), Piece(ADD, _COUNT, Amount("start")), Amount("size"))


def _joined_alone(match: Match) -> Arguments | None:
    tensors = arguments_of(match.pieces[0])["tensors"]
    full = [one for one in tensors if not is_empty(one)]
    return (full[0],) if len(full) == 1 else None


# A cache of transformers that is still empty, in front of what it keeps.
JOINS = (Whole(_aten.clone.default, Piece((_aten.cat.default,), ANY, ANY), _joined_alone),)

ROLLS = (
    Whole(
        _aten.roll.default,
        Piece((_aten.index_select.default,), X, Amount("axis"), _ROLLED),
        _roll,
    ),
)


def _permuted(match: Match) -> Arguments | None:
    inner, outer = (order_of(match.found[name]) for name in ("inner", "outer"))
    return (match.found["x"], [inner[axis] for axis in outer])


TURNS = tuple(
    Whole(_aten.permute.default, _turn, _permuted) for _turn in turns(turned(X, "inner"), "outer")
)
