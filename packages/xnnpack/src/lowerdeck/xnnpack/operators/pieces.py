"""Slices, selections, splits and concatenations."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch import fx
from torch.types import IntLikeType as Dim

from lowerdeck.serializer import XnnGraph
from lowerdeck.xnnpack.emit import (
    Call,
    Emission,
    Tracked,
    is_fixed,
    joined,
    reshape_refusal,
    resized,
    same_sizes,
    shape_of,
)
from lowerdeck.xnnpack.operators.contract import (
    MOVES,
    Integers,
    Operator,
    Table,
    first_of,
    fixed,
    fixed_axis,
    move,
    table,
)
from lowerdeck.xnnpack.operators.shapes import reshape, reshape_int8_refusal


def _slice(e: Emission, x: Tracked, call: Call) -> Tracked:
    if _takes_all(call):
        return x
    start, size = _bounds(call)
    if call.args["step"] == 1:
        return e.sliced(x, call.axis(), start, size)
    return _strided_slice(e, x, call, start, size)


def _strided_slice(e: Emission, x: Tracked, call: Call, start: int, size: int) -> Tracked:
    """Take every n-th element: pad to a multiple of n, reshape, and take the first of each n."""
    axis, step, shape, rank = call.axis(), int(call.args["step"]), x.shape, len(x.shape)
    count = -(-size // step)
    reach = min(count * step, int(shape[axis]) - start)
    x = e.sliced(x, axis, start, reach)
    missing = count * step - reach
    if missing:
        x = e.padded(x, (0,) * rank, [missing * (dim == axis) for dim in range(rank)])
    parts = e.view(x, (*shape[:axis], count, step, *shape[axis + 1 :]))
    return e.view(e.sliced(parts, axis + 1, 0, 1), call.result)


def _bounds(call: Call) -> tuple[int, int]:
    length, start, end = call.shape("self")[call.axis()], call.args["start"], call.args["end"]
    # A slice of a symbolic size has a fixed end.
    whole = int(length) if is_fixed(length) else end
    first = 0 if start is None else int(start)
    last = whole if end is None else int(end)
    first, last = (
        min(max(bound + whole if bound < 0 else bound, 0), whole) for bound in (first, last)
    )
    return first, max(last - first, 0)


def _takes_all(call: Call) -> bool:
    """Return whether a slice is a no-op, such as ``x[:]`` of a symbolic size."""
    before, after = call.shape("self"), call.result
    return call.args["step"] == 1 and same_sizes(before, after)


def _slice_refusal(call: Call) -> str | None:
    if _takes_all(call):
        return None
    # Reshapes split the dimension, and infer one dynamic size.
    dynamic = [axis for axis, size in enumerate(call.shape()) if not is_fixed(size)]
    many = call.rank() >= XnnGraph.MAX_RANK or len(dynamic) > 1 or call.axis() in dynamic
    if call.args["step"] != 1 and many:
        return "it takes only every n-th element of symbolic sizes, or of many dimensions"
    start, end = call.args["start"] or 0, call.args["end"]
    if not all(map(is_fixed, (start, end or 0))):
        return "its bounds are symbolic"
    return _dynamic_slice_refusal(call, start, call.result[call.axis()])


def _dynamic_slice_refusal(call: Call, first: int, length: Dim) -> str | None:
    """Refuse slices of a dynamic dimension other than its first element.

    XNNPACK does not check that the elements exist in a shorter input.
    """
    is_first = first == 0 and is_fixed(length) and length == 1
    return None if is_first else fixed_axis(call)


def _select(e: Emission, x: Tracked, call: Call) -> Tracked:
    axis = call.axis()
    index = int(call.args["index"])
    index += int(x.shape[axis]) if index < 0 else 0
    return reshape(e, e.sliced(x, axis, index, 1), call.result)


_INDEX = fixed(lambda call: [call.args["index"]], "its index is symbolic")


def _squeeze_refusal(call: Call) -> str | None:
    axis, shape = call.axis(), call.result
    return reshape_refusal((*shape[:axis], 1, *shape[axis:]), shape)


def _split(emission: Emission, call: Call) -> None:
    for user, piece in _split_pieces(emission, call):
        emission.define(user, piece)


def _unbind(emission: Emission, call: Call) -> None:
    # Emit all slices before the reshapes, so that the payload equals that of the decomposed
    # program.
    for user, piece in _split_pieces(emission, call):
        emission.define(user, reshape(emission, piece, shape_of(user)))


def _split_pieces(emission: Emission, call: Call) -> list[tuple[fx.Node, Tracked]]:
    """Return the used pieces by index, keeping the split dimension."""
    tracked = emission.of(call.args["self"])
    axis = call.axis()
    pieces = call.node.meta["val"]
    is_kept = pieces[0].dim() == len(tracked.shape)
    sizes = [int(piece.shape[axis]) if is_kept else 1 for piece in pieces]
    users = [(int(user.args[1]) % len(sizes), user) for user in call.node.users]  # type: ignore[arg-type]  # the index of a getitem
    return [
        (user, emission.sliced(tracked, axis, sum(sizes[:number]), sizes[number]))
        for number, user in sorted(users, key=lambda pair: pair[0])
    ]


def _piece_sizes(call: Call) -> list[Dim]:
    return [piece.shape[call.axis()] for piece in call.node.meta["val"]]


def _pieces_refusal(call: Call) -> str | None:
    if any(user.target is not operator.getitem for user in call.node.users):
        return "its pieces are used as a list"
    if any(is_fixed(size) and not size for piece in call.node.meta["val"] for size in piece.shape):
        return "a piece is empty"
    return fixed_axis(call)


def _cat(emission: Emission, call: Call) -> None:
    rank = len(call.result)
    operands = [emission.of(source) for source in call.args["tensors"]]
    layout = emission.common_layout(*operands, rank=rank)
    emission.define(call.node, joined(emission, operands, _joined_axis(call), layout))


def _joined_axis(call: Call) -> int:
    return int(call.args["dim"]) % len(call.result)


def _cat_refusal(call: Call) -> str | None:
    tensors = call.args["tensors"]
    if not isinstance(tensors, (list, tuple)) or len(tensors) < 1:
        return "it joins nothing"
    if len({len(shape_of(tensor)) for tensor in tensors}) != 1:
        return "its inputs differ in rank"
    return None


def _stack(emission: Emission, call: Call) -> None:
    axis, shape = _joined_axis(call), list(call.result)
    shape[axis] = 1
    parts = [resized(emission, emission.of(tensor), shape) for tensor in call.args["tensors"]]
    emission.define(call.node, joined(emission, parts, axis))


def _stack_refusal(call: Call) -> str | None:
    axis, shape = _joined_axis(call), call.result
    before, after = shape[:axis], shape[axis + 1 :]
    return reshape_refusal((*before, *after), (*before, 1, *after))


_OPTIONS: Mapping[str, Any] = {"int8_refusal": reshape_int8_refusal}
PIECES: Table = table(
    {
        "cat": Operator(_cat, _cat_refusal, integers=Integers.JOINS),
        "stack": Operator(
            _stack, first_of(_cat_refusal, _stack_refusal), integers=Integers.JOINS, **_OPTIONS
        ),
        "slice.Tensor slice_copy.Tensor": move(_slice, _slice_refusal),
        "select.int select_copy.int": move(
            _select,
            _INDEX,
            lambda call: _dynamic_slice_refusal(call, call.args["index"], 1),
            _squeeze_refusal,
            **_OPTIONS,
        ),
        "unbind.int unbind_copy.int": Operator(
            _unbind, first_of(_pieces_refusal, _squeeze_refusal), **MOVES, **_OPTIONS
        ),
        "split.Tensor split_copy.Tensor split.sizes split_with_sizes split_with_sizes_copy "
        "chunk": Operator(
            _split,
            first_of(fixed(_piece_sizes, "it cuts pieces of symbolic sizes"), _pieces_refusal),
            **MOVES,
        ),
    }
)
