"""Slices, selections, splits and joins."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch import fx
from torch.types import IntLikeType as Dim

from lowerdeck.serializer import XnnGraph, XnnOperator
from lowerdeck.xnnpack.emit import (
    Call,
    Emission,
    Tracked,
    is_fixed,
    joined,
    reshape_refusal,
    resized,
    shape_of,
)
from lowerdeck.xnnpack.operators.contract import (
    MOVES,
    Integers,
    Operator,
    Table,
    move,
    table,
)
from lowerdeck.xnnpack.operators.images import padded
from lowerdeck.xnnpack.operators.shapes import reshape, reshape_int8_refusal


def stretch(emission: Emission, tracked: Tracked, axis: int, start: int, size: int) -> Tracked:
    """Return a part of a tensor along one dimension, which has a fixed size.

    Args:
        axis: The dimension.
        start: The first index of the part.
        size: How many there are.
    """
    if size == tracked.shape[axis]:
        return tracked
    layout = tracked.preferred
    rank = len(tracked.shape)
    shape = (*tracked.shape[:axis], size, *tracked.shape[axis + 1 :])
    at = layout.position(axis, rank)
    # Size 0 stands for all of a dimension, whatever its size is at run time.
    return emission.unary(
        XnnOperator.STATIC_SLICE,
        tracked,
        shape=shape,
        num_dims=rank,
        offsets=tuple(start if one == at else 0 for one in range(rank)),
        sizes=tuple(size if one == at else 0 for one in range(rank)),
    )


def _slice(e: Emission, x: Tracked, call: Call) -> Tracked:
    if _takes_all(call):
        return x
    start, size = _bounds(call)
    if call.args["step"] == 1:
        return stretch(e, x, call.axis(), start, size)
    return _every(e, x, call, start, size)


def _every(e: Emission, x: Tracked, call: Call, start: int, size: int) -> Tracked:
    """Take every n-th element: the first of each n, after padding to a whole number of them."""
    axis, step, shape = call.axis(), int(call.args["step"]), x.shape
    count = -(-size // step)
    reach = min(count * step, int(shape[axis]) - start)
    value = e.id_of(stretch(e, x, axis, start, reach))
    missing = count * step - reach
    if missing:
        sizes = (*shape[:axis], count * step, *shape[axis + 1 :])
        after = [missing if one == axis else 0 for one in range(len(shape))]
        value = padded(e, value, sizes, (0,) * len(shape), after)
    parted = (*shape[:axis], count, step, *shape[axis + 1 :])
    parts = e.tracked(parted, e.reshaped(value, parted))
    return e.view(stretch(e, parts, axis + 1, 0, 1), shape_of(call.node))


def _bounds(call: Call) -> tuple[int, int]:
    whole = int(call.shape("self")[call.axis()])
    start, end = call.args["start"], call.args["end"]
    first = 0 if start is None else int(start)
    last = whole if end is None else int(end)
    first, last = (min(max(one + whole if one < 0 else one, 0), whole) for one in (first, last))
    return first, max(last - first, 0)


def _takes_all(call: Call) -> bool:
    """Return whether a slice is all of its tensor, such as ``x[:]`` of a symbolic size."""
    before, after = call.shape("self"), shape_of(call.node)
    return call.args["step"] == 1 and tuple(map(str, before)) == tuple(map(str, after))


def _slice_refusal(call: Call) -> str | None:
    if _takes_all(call):
        return None
    if call.args["step"] != 1 and (
        call.rank("self") >= XnnGraph.MAX_RANK
        or not all(is_fixed(one) for one in call.shape("self"))
    ):
        return "it takes only every n-th element of symbolic sizes, or of many dimensions"
    if not is_fixed(call.shape("self")[call.axis()]):
        return "it cuts a symbolic size"
    if not all(
        one is None or isinstance(one, int) for one in (call.args["start"], call.args["end"])
    ):
        return "its bounds are symbolic"
    return None


def _select(e: Emission, x: Tracked, call: Call) -> Tracked:
    axis = call.axis()
    index = int(call.args["index"]) % int(x.shape[axis])
    return reshape(e, stretch(e, x, axis, index, 1), shape_of(call.node))


def _select_refusal(call: Call) -> str | None:
    if not isinstance(call.args["index"], int):
        return "its index is symbolic"
    if not is_fixed(call.shape("self")[call.axis()]):
        return "it cuts a symbolic size"
    return _drop_refusal(call, shape_of(call.node))


def _drop_refusal(call: Call, shape: Sequence[Dim]) -> str | None:
    axis = call.axis()
    return reshape_refusal((*shape[:axis], 1, *shape[axis:]), shape)


def _split(emission: Emission, call: Call) -> None:
    for user, piece in _split_pieces(emission, call):
        emission.define(user, piece)


def _unbind(emission: Emission, call: Call) -> None:
    # All slices come before the reshapes, as in the decomposed program: both get one payload.
    for user, piece in _split_pieces(emission, call):
        emission.define(user, reshape(emission, piece, shape_of(user)))


def _split_pieces(emission: Emission, call: Call) -> list[tuple[fx.Node, Tracked]]:
    """Return the pieces that are read, by their index, each with its dimension still there."""
    tracked = emission.of(call.args["self"])
    axis = call.axis()
    pieces = call.node.meta["val"]
    is_kept = pieces[0].dim() == len(tracked.shape)
    sizes = [int(piece.shape[axis]) if is_kept else 1 for piece in pieces]
    users = [(int(user.args[1]) % len(sizes), user) for user in call.node.users]  # type: ignore[arg-type]  # the index of a getitem
    return [
        (user, stretch(emission, tracked, axis, sum(sizes[:number]), sizes[number]))
        for number, user in sorted(users, key=lambda one: one[0])
    ]


def _split_refusal(call: Call) -> str | None:
    axis = call.axis()
    if not all(is_fixed(piece.shape[axis]) for piece in call.node.meta["val"]):
        return "it cuts pieces of symbolic sizes"
    return _pieces_refusal(call)


def _pieces_refusal(call: Call) -> str | None:
    if any(user.target is not operator.getitem for user in call.node.users):
        return "its pieces are used as a list"
    if any(is_fixed(size) and not size for piece in call.node.meta["val"] for size in piece.shape):
        return "a piece is empty"
    if not is_fixed(call.shape("self")[call.axis()]):
        return "it cuts a symbolic size"
    return None


def _unbind_refusal(call: Call) -> str | None:
    return _pieces_refusal(call) or _drop_refusal(call, call.node.meta["val"][0].shape)


def _cat(emission: Emission, call: Call) -> None:
    shape = shape_of(call.node)
    rank, axis = len(shape), int(call.args["dim"]) % len(shape)
    operands = [emission.of(one) for one in call.args["tensors"]]
    layout = emission.common_layout(*operands, rank=rank)
    emission.define(call.node, joined(emission, operands, axis, layout))


def _cat_refusal(call: Call) -> str | None:
    tensors = call.args["tensors"]
    if not isinstance(tensors, (list, tuple)) or len(tensors) < 1:
        return "it joins nothing"
    if len({len(shape_of(one)) for one in tensors}) != 1:
        return "its inputs differ in rank"
    return None


def _stack(emission: Emission, call: Call) -> None:
    shape = shape_of(call.node)
    rank = len(shape)
    axis = int(call.args["dim"]) % rank
    single = (*shape[:axis], 1, *shape[axis + 1 :])
    parts = [resized(emission, emission.of(one), single) for one in call.args["tensors"]]
    emission.define(call.node, joined(emission, parts, axis))


def _stack_refusal(call: Call) -> str | None:
    shape = shape_of(call.node)
    axis = int(call.args["dim"]) % len(shape)
    single = (*shape[:axis], 1, *shape[axis + 1 :])
    return _cat_refusal(call) or reshape_refusal((*shape[:axis], *shape[axis + 1 :]), single)


PIECES: Table = table(
    {
        "cat": Operator(_cat, _cat_refusal, integers=Integers.JOINS),
        "stack": Operator(
            _stack, _stack_refusal, integers=Integers.JOINS, int8_refusal=reshape_int8_refusal
        ),
        "slice.Tensor slice_copy.Tensor": move(_slice, _slice_refusal),
        "select.int select_copy.int": move(
            _select, _select_refusal, int8_refusal=reshape_int8_refusal
        ),
        "unbind.int unbind_copy.int": Operator(
            _unbind, _unbind_refusal, int8_refusal=reshape_int8_refusal, **MOVES
        ),
        "split.Tensor split_copy.Tensor split.sizes split_with_sizes split_with_sizes_copy "
        "chunk": Operator(_split, _split_refusal, **MOVES),
    }
)
