"""The pieces of each operator, as torch's decompositions and authors of models leave them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.fx import Node
from torch.types import IntLikeType as Dim

from lowerdeck.torch_base import OpOverload, arguments_of
from lowerdeck.xnnpack.emit.arguments import is_fixed, is_one, shape_of
from lowerdeck.xnnpack.recognise.matching import (
    Amount,
    Both,
    Either,
    LastAxis,
    Leaf,
    Match,
    Pattern,
    Piece,
    Whatever,
    same_sizes,
)

_aten = torch.ops.aten
Arguments: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Whole:
    """An operator and its pieces.

    Attributes:
        op: The operator.
        pieces: The pattern, which ends where the operator's result is.
        arguments: Returns what to call the operator with; None where the pieces only look like it.
    """

    op: OpOverload
    pieces: Piece
    arguments: Callable[[Match], Arguments | None]


_ADD = (_aten.add.Tensor, _aten.add.Scalar)
_MUL = (_aten.mul.Tensor, _aten.mul.Scalar)
_DIV = (_aten.div.Tensor, _aten.div.Scalar)
_VIEW = (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default)
_ATTENTION = _aten.scaled_dot_product_attention.default
_X, _W, _B = Leaf("x"), Leaf("w"), Leaf("b")
_ANY = Whatever()


def _view(pattern: Pattern, name: str = "") -> Piece:
    return Piece(_VIEW, pattern, _ANY, name=name)


def _turns(pattern: Pattern, name: str) -> tuple[Piece, ...]:
    return (
        Piece((_aten.permute.default,), pattern, _ANY, name=name),
        Piece((_aten.transpose.int,), pattern, _ANY, _ANY, name=name),
        Piece((_aten.t.default,), pattern, name=name),
    )


def _turned(pattern: Pattern, name: str) -> Either:
    """Return a tensor with its dimensions in another order, whichever."""
    return Either(*_turns(pattern, name))


def _order_of(node: Node) -> list[int]:
    """Return which dimension of its source each dimension of a turned tensor is."""
    args = arguments_of(node)
    rank = len(shape_of(args["self"]))
    if "dims" in args:
        return [int(one) % rank for one in args["dims"]]
    order = list(range(rank))
    if rank > 1:
        first, second = int(args.get("dim0", 0)), int(args.get("dim1", 1))
        order[first], order[second] = order[second], order[first]
    return order


def _swaps_last_two(node: Node) -> bool:
    order = _order_of(node)
    return len(order) > 1 and order == [*range(len(order) - 2), len(order) - 1, len(order) - 2]


# -- linear layers and products of matrices


def _linear(match: Match) -> Arguments | None:
    x, w, b = (match.found.get(name) for name in ("x", "w", "b"))
    if not _swaps_last_two(match.found["turned"]) or not _is_row_by_row(match, shape_of(w)[0]):  # type: ignore[arg-type]  # a leaf
        return None
    return (x, w, b) if b is None or len(shape_of(b)) == 1 else None


def _rows_times_matrix(match: Match) -> Arguments | None:
    x, w = match.found["x"], match.found["w"]
    if len(shape_of(x)) < 2 or not _is_row_by_row(match, shape_of(w)[1]):
        return None
    return (x, w)


def _is_row_by_row(match: Match, columns: Dim) -> bool:
    """Return whether rows are laid out as one matrix, and what comes of them back again."""
    shape = shape_of(match.found["x"])
    if not shape or not same_sizes(shape_of(match.pieces[0]), (*shape[:-1], columns)):
        return False
    return same_sizes(shape_of(match.found["rows"])[1:], shape[-1:])


def _product(match: Match) -> Arguments | None:
    left, right = match.found["x"], match.found["w"]
    result = shape_of(match.pieces[0])
    wide = [
        shape_of(match.found.get(name, one))
        for name, one in (("wide left", left), ("wide right", right))
    ]
    flat = [shape_of(match.found[name]) for name in ("left", "right")]
    if len(result) < 3 or any(len(one) != 3 for one in flat):
        return None
    if not all(
        same_sizes(one[:-2], result[:-2]) and same_sizes(one[-2:], rows[1:])
        for one, rows in zip(wide, flat, strict=True)
    ):
        return None
    if not same_sizes(result[-2:], (wide[0][-2], wide[1][-1])):
        return None
    batches = _broadcast(shape_of(left)[:-2], shape_of(right)[:-2])
    return (left, right) if same_sizes(batches, result[:-2]) else None


def _broadcast(left: Sequence[Dim], right: Sequence[Dim]) -> list[Dim]:
    rank = max(len(left), len(right))
    wide = ((*(1,) * (rank - len(one)), *one) for one in (left, right))
    return [b if is_one(a) else a for a, b in zip(*wide, strict=True)]


def _side(leaf: Leaf, name: str) -> Piece:
    wide = Piece((_aten.expand.default,), leaf, _ANY, name=f"wide {name}")
    return _view(Either(wide, leaf), name)


_ROWS = _view(_X, "rows")
_ADDMM = Piece((_aten.addmm.default,), _B, _ROWS, _turned(_W, "turned"))
_MM = Piece((_aten.mm.default,), _ROWS, _turned(_W, "turned"))
_BMM = Piece((_aten.bmm.default,), _side(_X, "left"), _side(_W, "right"))
PRODUCTS = (
    Whole(_aten.linear.default, _view(_ADDMM), _linear),
    Whole(_aten.linear.default, _view(_MM), _linear),
    Whole(_aten.matmul.default, _view(Piece((_aten.mm.default,), _ROWS, _W)), _rows_times_matrix),
    Whole(_aten.matmul.default, _view(_BMM), _product),
)


def _layer(match: Match) -> Arguments | None:
    """Return the arguments of a linear layer whose input lies in another order in memory."""
    x, w, b = (match.found.get(name) for name in ("x", "w", "b"))
    shape, weight = shape_of(x), shape_of(w)  # type: ignore[arg-type]  # leaves
    if len(weight) != 2 or not _swaps_last_two(match.found["turned"]):
        return None
    if b is not None and not same_sizes(shape_of(b), weight[:1]):
        return None
    return (x, w, b) if same_sizes(shape[-1:], weight[1:]) else None


_TURNED_PRODUCT = Piece((_aten.matmul.default,), _X, _turned(_W, "turned"))
LAYERS = (
    Whole(
        _aten.linear.default,
        Piece((_aten.add.Tensor,), _TURNED_PRODUCT, _B, commutes=True),
        _layer,
    ),
    Whole(_aten.linear.default, _TURNED_PRODUCT, _layer),
)


# -- functions of one tensor


def _six(pattern: Pattern) -> Either:
    """Return a tensor that is clamped to 0 and 6."""
    clamp = (_aten.clamp.default,)
    return Either(
        Piece(clamp, Piece(clamp, pattern, 0), None, 6),
        Piece(clamp, pattern, 0, 6),
        Piece((_aten.clamp_max.default,), Piece((_aten.clamp_min.default,), pattern, 0), 6),
        Piece((_aten.hardtanh.default,), pattern, 0, 6),
        Piece((_aten.relu6.default,), pattern),
    )


def _of_x(match: Match) -> Arguments | None:
    return (match.found["x"],)


_SHIFTED = _six(Piece(_ADD, _X, 3))
_SIXTH = Piece(_DIV, _SHIFTED, 6)


def _prelu(match: Match) -> Arguments | None:
    x, slope = match.found["x"], match.found["w"]
    sizes, shape = shape_of(slope), shape_of(x)
    one_each = len(sizes) == len(shape) > 1 and all(
        same_sizes([size], [shape[1]]) if axis == 1 else is_one(size)
        for axis, size in enumerate(sizes)
    )
    return (x, slope) if one_each or all(map(is_one, sizes)) else None


_POSITIVE = Piece((_aten.gt.Scalar,), _X, 0)
_PRELU = Piece((_aten.where.self,), _POSITIVE, _X, Piece(_MUL, _W, _X, commutes=True))

_SIGMOID = Piece((_aten.sigmoid.default,), _X)
FUNCTIONS = (
    Whole(_aten.silu.default, Piece((_aten.mul.Tensor,), _X, _SIGMOID, commutes=True), _of_x),
    Whole(
        _aten.hardswish.default, Piece(_DIV, Piece(_MUL, _X, _SHIFTED, commutes=True), 6), _of_x
    ),
    Whole(_aten.hardswish.default, Piece(_MUL, _X, _SIXTH, commutes=True), _of_x),
    Whole(_aten.hardsigmoid.default, _SIXTH, _of_x),
    Whole(_aten._prelu_kernel.default, _PRELU, _prelu),
)


# -- norms


def _rms_norm(match: Match) -> Arguments | None:
    x, w, eps = (match.found.get(name) for name in ("x", "w", "eps"))
    (width,) = shape_of(x)[-1:]  # type: ignore[arg-type]  # a leaf
    if not is_fixed(width) or not float(eps or 0) > 0:
        return None
    if w is not None and not same_sizes(shape_of(w), [width]):
        return None
    return (x, [int(width)], w, eps)


_SQUARE = Either(
    Piece((_aten.pow.Tensor_Scalar,), _X, 2),
    Piece((_aten.square.default,), _X),
    Piece((_aten.mul.Tensor,), _X, _X),
)
_MEAN = Piece((_aten.mean.dim,), _SQUARE, LastAxis(), True)
_VARIANCE = Piece(_ADD, _MEAN, Amount("eps"))
_FACTOR = Either(
    Piece((_aten.rsqrt.default,), _VARIANCE), Piece((_aten.pow.Tensor_Scalar,), _VARIANCE, -0.5)
)
_NORMED = Piece((_aten.mul.Tensor,), _X, _FACTOR, commutes=True)
NORMS = (
    Whole(
        _aten.rms_norm.default,
        Piece((_aten.mul.Tensor,), _NORMED, _W, commutes=True),
        _rms_norm,
    ),
    Whole(_aten.rms_norm.default, _NORMED, _rms_norm),
)


# -- attention


def _scaled(pattern: Pattern, name: str) -> Either:
    """Return a tensor that may be multiplied by a number, or divided by one."""
    return Either(
        Piece(_MUL, pattern, Amount(f"{name} times")),
        Piece(_DIV, pattern, Amount(f"{name} by")),
        pattern,
    )


def _scores(*, masked: bool) -> Either:
    keys = Either(
        _scaled(_turned(Leaf("key"), "turned"), "key"),
        _turned(_scaled(Leaf("key"), "key"), "turned"),
    )
    product = Piece(
        (_aten.matmul.default, _aten.bmm.default), _scaled(Leaf("query"), "query"), keys
    )
    scores = _scaled(product, "scores")
    if not masked:
        return scores
    added = Piece((_aten.add.Tensor,), scores, Leaf("mask"), commutes=True, name="masked")
    return Either(added, scores)


def _weights(scores: Pattern) -> Either:
    """Return a softmax, which torch takes apart with 0 instead of NaN where all is -inf."""
    plain = Either(
        Piece((_aten._softmax.default,), scores, LastAxis(), False),
        Piece((_aten.softmax.int,), scores, LastAxis()),
    )
    invert = (_aten.logical_not.default,)
    low = Piece((_aten.eq.Scalar,), Leaf("scores"), -math.inf)
    empty = Piece(invert, Piece((_aten.any.dim,), Piece(invert, low), LastAxis(), True))
    zeros = Piece((_aten.full_like.default,), Leaf("weights"), 0)
    softmax = Piece((_aten._softmax.default,), Both(Leaf("scores"), scores), LastAxis(), False)
    safe = Piece((_aten.where.self,), empty, zeros, Both(Leaf("weights"), softmax), name="safe")
    return Either(safe, plain)


def _attention(match: Match) -> Arguments | None:
    query, key, value, mask = (match.found.get(one) for one in ("query", "key", "value", "mask"))
    shapes = [shape_of(one) for one in (query, key, value)]  # type: ignore[arg-type]  # leaves
    if not _swaps_last_two(match.found["turned"]) or len(shapes[0]) < 3:
        return None
    if not all(same_sizes(one[:-2], shapes[0][:-2]) for one in shapes[1:]):
        return None
    if not same_sizes(shapes[0][-1:], shapes[1][-1:]):
        return None
    if mask is not None and not _only_masks(match, (*shapes[0][:-1], shapes[1][-2])):
        return None
    scale = 1.0
    for name in ("query", "key", "scores"):
        scale *= match.found.get(f"{name} times", 1.0)
        divisor = match.found.get(f"{name} by", 1.0)
        scale = scale / divisor if divisor else math.nan
    return (query, key, value, mask, 0.0, False, scale) if math.isfinite(scale) else None


def _only_masks(match: Match, scores: Sequence[Dim]) -> bool:
    """Return whether a mask is no larger than the scores, and empty rows of it become 0."""
    return "safe" in match.found and same_sizes(shape_of(match.found["masked"]), scores)


def _repeated(name: str) -> Piece:
    """Return heads, each as often as it has queries."""
    single = Piece((_aten.unsqueeze.default,), Leaf(name), 2)
    many = Piece((_aten.expand.default,), single, _ANY, name=f"many {name}")
    return _view(many, f"all {name}")


def _grouped(match: Match) -> Arguments | None:
    args = arguments_of(match.pieces[0])
    key, value = (match.found[name] for name in ("key", "value"))
    for name, one in (("key", key), ("value", value)):
        shape, many = shape_of(one), shape_of(match.found[f"many {name}"])
        heads = shape_of(match.found[f"all {name}"])
        if len(shape) != 4 or not all(map(is_fixed, (shape[1], many[2]))):
            return None
        if not same_sizes(many, (*shape[:2], many[2], *shape[2:])):
            return None
        if not same_sizes(heads, (shape[0], int(shape[1]) * int(many[2]), *shape[2:])):
            return None
    if not same_sizes(shape_of(args["query"])[:2], shape_of(match.found["all key"])[:2]):
        return None
    return (args["query"], key, value, args["attn_mask"], 0.0, args["is_causal"],
            args["scale"], True)  # fmt: skip


_PRODUCT = (_aten.matmul.default, _aten.bmm.default)
ATTENTION = (
    Whole(_ATTENTION, Piece(_PRODUCT, _weights(_scores(masked=True)), Leaf("value")), _attention),
)
GROUPS = (
    Whole(
        _ATTENTION,
        Piece(
            *((_ATTENTION,), Leaf("query"), _repeated("key"), _repeated("value")),
            *(Either(Leaf("mask"), None), 0, _ANY, _ANY, False),
        ),
        _grouped,
    ),
)


# -- pixels and channels


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
        and _order_of(match.found["turned"]) == list(order)
        and same_sizes(shape_of(match.found["together"])[1:], joined)
    )


_OUT, _IN = (0, 1, 4, 2, 5, 3), (0, 1, 3, 5, 2, 4)
_MOVED = _view(_turned(_view(_X, "apart"), "turned"), "together")
PIXELS = (
    Whole(_aten.pixel_shuffle.default, _MOVED, _pixel_shuffle),
    Whole(_aten.pixel_unshuffle.default, _MOVED, _pixel_unshuffle),
    Whole(_aten.channel_shuffle.default, _MOVED, _channel_shuffle),
)


# -- permutations


def _permuted(match: Match) -> Arguments | None:
    inner, outer = (_order_of(match.found[name]) for name in ("inner", "outer"))
    return (match.found["x"], [inner[axis] for axis in outer])


TURNS = tuple(
    Whole(_aten.permute.default, _turn, _permuted)
    for _turn in _turns(_turned(_X, "inner"), "outer")
)

STAGES: tuple[tuple[Whole, ...], ...] = (
    (*PRODUCTS, *FUNCTIONS, *NORMS, *PIXELS),
    (*LAYERS, *ATTENTION),
    GROUPS,
    TURNS,
)
"""What is recognised, in order: later ones are made of what earlier ones found."""
