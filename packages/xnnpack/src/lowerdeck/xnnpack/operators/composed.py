"""Operators composed of several XNNPACK nodes."""

from __future__ import annotations

import math

import torch

from lowerdeck.serializer import XnnOperator
from lowerdeck.xnnpack.emit import Call, Emission, Tracked, broadcast, is_fixed, joined
from lowerdeck.xnnpack.operators.arithmetic import scaled
from lowerdeck.xnnpack.operators.contract import (
    Integers,
    Table,
    fixed,
    fixed_axis,
    function,
    keeps_dtype,
    move,
    one_symbol,
    table,
)
from lowerdeck.xnnpack.operators.images import largest_of_rows
from lowerdeck.xnnpack.operators.normalization import weighted_sums


def _addcmul(e: Emission, base: Tracked, call: Call) -> Tracked:
    left, right = (e.of(call.args[name]) for name in ("tensor1", "tensor2"))
    if call.args["value"] != 1:
        # Scaling a constant is free, and scaling the smaller operand is cheaper.
        left, right = sorted(
            (left, right), key=lambda operand: (not operand.is_constant, len(operand.shape))
        )
        left = scaled(e, left, float(call.args["value"]))
    shape, sizes = call.result, broadcast(left.shape, right.shape)
    wide = (*(1,) * (len(shape) - len(sizes)), *sizes)
    product = e.binary(XnnOperator.MULTIPLY, left, right, shape=wide)
    return e.binary(XnnOperator.ADD, base, product, call.limits, shape=shape)


def _factor_refusal(call: Call) -> str | None:
    number = isinstance(call.args["value"], (int, float))
    return None if number else "its factor is not a plain number"


def _log_softmax(e: Emission, x: Tracked, _: Call) -> Tracked:
    """Return ``x - max - log(sum(exp(x - max)))``: the logarithm of a softmax would underflow."""
    rows = e.plain(x)
    moved = e.binary(XnnOperator.SUBTRACT, rows, largest_of_rows(e, rows))
    total = weighted_sums(e, e.unary(XnnOperator.EXP, moved), torch.ones(1, int(x.shape[-1])))
    return e.binary(XnnOperator.SUBTRACT, moved, e.unary(XnnOperator.LOG, total))


def _last_axis_refusal(call: Call) -> str | None:
    last = call.rank() and call.axis() == call.rank() - 1
    return None if last else "it is not along the last dimension"


def _roll(e: Emission, x: Tracked, call: Call) -> Tracked:
    for shift, dim in zip(call.args["shifts"], call.args["dims"], strict=True):
        axis = dim % len(x.shape)
        size = int(x.shape[axis])
        start = -shift % size
        if start:
            parts = e.sliced(x, axis, start, size - start), e.sliced(x, axis, 0, start)
            x = joined(e, parts, axis, x.preferred)
    return x


def _roll_refusal(call: Call) -> str | None:
    flat = len(call.args["shifts"]) != len(call.args["dims"])
    return "it rolls the flattened tensor" if flat else None


def _glu(e: Emission, x: Tracked, call: Call) -> Tracked:
    axis = call.axis()
    half = int(x.shape[axis]) // 2
    first, second = (e.sliced(x, axis, start, half) for start in (0, half))
    return e.binary(XnnOperator.MULTIPLY, first, e.unary(XnnOperator.SIGMOID, second))


def _repeat(e: Emission, x: Tracked, call: Call) -> Tracked:
    """Repeat one dimension at a time, with broadcasting arithmetic."""
    times = _times_repeated(call)
    x = e.view(x, (*(1,) * (len(times) - len(x.shape)), *x.shape))
    for axis, many in enumerate(times):
        if many > 1:
            x = _repeated(e, x, axis, many, interleaved=False)
    return x


def _times_repeated(call: Call) -> list[int]:
    times = list(call.args["repeats" if "repeats" in call.args else "dims"])
    return [*[1] * (call.rank("self") - len(times)), *times]


def _repeat_interleave(e: Emission, x: Tracked, call: Call) -> Tracked:
    many, axis = int(call.args["repeats"]), call.axis()
    if one_symbol(call):
        pieces = [e.sliced(x, axis, index, 1) for index in range(int(x.shape[axis]))]
        return e.plain(joined(e, [piece for piece in pieces for _ in range(many)], axis))
    return e.plain(_repeated(e, x, axis, many, interleaved=True) if many > 1 else x)


def _pieces_refusal(call: Call) -> str | None:
    """Refuse several symbolic sizes if too many pieces would be concatenated."""
    size = call.shape()[call.axis()]
    few = is_fixed(size) and int(size) * int(call.args["repeats"]) <= _MOST_PIECES
    return None if few else one_symbol(call)


def _repeated(
    emission: Emission, tracked: Tracked, axis: int, many: int, *, interleaved: bool
) -> Tracked:
    """Repeat one dimension, element by element if ``interleaved``."""
    shape = tracked.shape
    before, size, after = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
    apart = emission.view(
        tracked, (before, size, 1, after) if interleaved else (before, 1, size, after)
    )
    ones = torch.ones([1, 1, many, 1] if interleaved else [1, many, 1, 1])
    wide = emission.binary(XnnOperator.MULTIPLY, apart, Tracked.of(ones))
    return emission.view(wide, (*shape[:axis], size * many, *shape[axis + 1 :]))


def _flat_refusal(call: Call) -> str | None:
    flat = call.args["dim"] is None or not call.rank()
    return "it flattens its input before repeating it" if flat else None


_MOST_PIECES = 64
_TIMES = "it repeats elements a symbolic number of times"
COMPOSED: Table = table(
    {
        "addcmul": function(
            _addcmul,
            _factor_refusal,
            fixed(
                lambda call: (*call.shape("tensor1"), *call.shape("tensor2")),
                "its product has symbolic sizes",
            ),
            clamps=True,
        ),
        "log_softmax.int _log_softmax": function(
            _log_softmax,
            keeps_dtype,
            _last_axis_refusal,
            fixed(Call.shape, "it has symbolic sizes"),
            wide=True,
        ),
        "glu": function(_glu, fixed_axis),
        "repeat tile": move(
            _repeat, fixed(_times_repeated, _TIMES), one_symbol, integers=Integers.NEVER
        ),
        "repeat_interleave.self_int": move(
            _repeat_interleave,
            fixed(lambda call: [call.args["repeats"]], _TIMES),
            _flat_refusal,
            _pieces_refusal,
            integers=Integers.NEVER,
        ),
        "roll": move(
            _roll,
            _roll_refusal,
            fixed(lambda call: call.args["shifts"], "it rolls by a symbolic number"),
            fixed(
                lambda call: [call.shape()[dim] for dim in call.args["dims"]],
                "it rolls a symbolic size",
            ),
            integers=Integers.NEVER,
        ),
    }
)
