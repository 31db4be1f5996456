"""Operators that XNNPACK lacks, written with those that it has."""

from __future__ import annotations

import math

import torch

from lowerdeck.serializer import XnnOperator
from lowerdeck.xnnpack.emit import (
    Call,
    Emission,
    Tracked,
    broadcast,
    is_fixed,
    joined,
    shape_of,
    symbols_refusal,
)
from lowerdeck.xnnpack.operators.arithmetic import scale_refusal, scaled
from lowerdeck.xnnpack.operators.contract import Integers, Scales, Table, function, move, table
from lowerdeck.xnnpack.operators.elementwise import UNIT
from lowerdeck.xnnpack.operators.images import largest_of_rows
from lowerdeck.xnnpack.operators.normalization import weighted_sums
from lowerdeck.xnnpack.operators.pieces import stretch


def _addcmul(e: Emission, base: Tracked, call: Call) -> Tracked:
    left, right = (e.of(call.args[name]) for name in ("tensor1", "tensor2"))
    if call.args["value"] != 1:
        # Scaling a constant costs nothing, and the smaller of two less than the larger.
        left, right = sorted((left, right), key=lambda one: (not one.is_constant, len(one.shape)))
        left = scaled(e, left, float(call.args["value"]))
    shape = shape_of(call.node)
    rank = len(shape)
    layout = e.common_layout(base, left, right, rank=rank)
    sizes = broadcast(left.shape, right.shape)
    product = e.add(
        XnnOperator.MULTIPLY,
        (*(1,) * (rank - len(sizes)), *sizes),
        layout,
        input1_id=e.aligned(left, rank, layout),
        input2_id=e.aligned(right, rank, layout),
    )
    first = e.aligned(base, rank, layout)
    value = e.add(XnnOperator.ADD, shape, layout, call.limits, input1_id=first, input2_id=product)
    return e.tracked(shape, value, layout)


def _addcmul_refusal(call: Call) -> str | None:
    if not isinstance(call.args["value"], (int, float)):
        return "its factor is not a plain number"
    names = ("tensor1", "tensor2")
    if not all(is_fixed(size) for name in names for size in call.shape(name)):
        return "its product has symbolic sizes"
    return None


def _log_softmax(e: Emission, x: Tracked, _: Call) -> Tracked:
    """Return ``x - max - log(sum(exp(x - max)))``: a softmax's logarithm would lose its tail."""
    rows = e.plain(x)
    moved = e.binary(XnnOperator.SUBTRACT, rows, largest_of_rows(e, rows))
    total = weighted_sums(e, e.unary(XnnOperator.EXP, moved), torch.ones(1, int(x.shape[-1])))
    return e.binary(XnnOperator.SUBTRACT, moved, e.unary(XnnOperator.LOG, total))


def _log_softmax_refusal(call: Call) -> str | None:
    shape = call.shape("self")
    if call.args.get("half_to_float") or call.args.get("dtype") is not None:
        return "it changes the dtype"
    if not shape or call.axis() != len(shape) - 1:
        return "it is not along the last dimension"
    return None if all(map(is_fixed, shape)) else "it has symbolic sizes"


def _roll(e: Emission, x: Tracked, call: Call) -> Tracked:
    for shift, dim in zip(call.args["shifts"], call.args["dims"], strict=True):
        axis = dim % len(x.shape)
        size = int(x.shape[axis])
        start = -shift % size
        if start:
            pieces = [
                stretch(e, x, axis, first, count)
                for first, count in ((start, size - start), (0, start))
            ]
            x = joined(e, pieces, axis, x.preferred)
    return x


def _roll_refusal(call: Call) -> str | None:
    shifts, dims = call.args["shifts"], call.args["dims"]
    if len(shifts) != len(dims):
        return "it rolls the flattened tensor"
    if not all(isinstance(shift, int) for shift in shifts):
        return "it rolls by a symbolic number"
    if not all(is_fixed(call.shape("self")[dim]) for dim in dims):
        return "it rolls a symbolic size"
    return None


def _glu(e: Emission, x: Tracked, call: Call) -> Tracked:
    axis = call.axis()
    half = int(x.shape[axis]) // 2
    integers = e.writes.is_int8
    with e.made_as(x.encoding if integers else None):
        first, second = (stretch(e, x, axis, start, half) for start in (0, half))
    with e.made_as(UNIT if integers else None):
        gate = e.unary(XnnOperator.SIGMOID, second)
    return e.binary(XnnOperator.MULTIPLY, first, gate)


def _glu_scale_refusal(call: Call, scales: Scales) -> str | None:
    source, result = scales.inputs[0], scales.result
    # Half a step of the sigmoid, 1/512, times what it is multiplied by, must be less than a step
    # of the result: the two then round to neighbours at most.
    if max(source.zero_point + 128, 127 - source.zero_point) * source.scale > 500 * result.scale:
        return "its result is much finer than its input is wide"
    return scale_refusal(XnnOperator.MULTIPLY, call, Scales((source, UNIT), result))


def _glu_refusal(call: Call) -> str | None:
    return None if is_fixed(call.shape("self")[call.axis()]) else "it cuts a symbolic size"


def _repeat(e: Emission, x: Tracked, call: Call) -> Tracked:
    """Repeat along one dimension after the other: only arithmetic repeats, by broadcasting."""
    times = _times_repeated(call)
    x = e.view(x, (*(1,) * (len(times) - len(x.shape)), *x.shape))
    for axis, many in enumerate(times):
        if many > 1:
            x = _repeated(e, x, axis, many, each=False)
    return x


def _times_repeated(call: Call) -> list[int]:
    times = list(call.args["repeats" if "repeats" in call.args else "dims"])
    return [*[1] * (call.rank("self") - len(times)), *times]


def _repeat_interleave(e: Emission, x: Tracked, call: Call) -> Tracked:
    many = int(call.args["repeats"])
    return e.plain(_repeated(e, x, call.axis(), many, each=True) if many > 1 else x)


def _repeated(
    emission: Emission, tracked: Tracked, axis: int, many: int, *, each: bool
) -> Tracked:
    """Return a tensor of which one dimension is repeated, as a whole or each index of it."""
    shape = tracked.shape
    before, size, after = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
    apart = emission.view(tracked, (before, size, 1, after) if each else (before, 1, size, after))
    ones = torch.ones([1, 1, many, 1] if each else [1, many, 1, 1])
    wide = emission.binary(XnnOperator.MULTIPLY, apart, Tracked(tuple(ones.shape), ones))
    return emission.view(wide, (*shape[:axis], size * many, *shape[axis + 1 :]))


def _repeat_refusal(call: Call) -> str | None:
    if not all(isinstance(many, int) for many in _times_repeated(call)):
        return "it repeats elements a symbolic number of times"
    return symbols_refusal(call.shape("self"))


def _repeat_interleave_refusal(call: Call) -> str | None:
    if not isinstance(call.args["repeats"], int):
        return "it repeats elements a symbolic number of times"
    if call.args["dim"] is None or not call.rank("self"):
        return "it flattens what it repeats"
    return symbols_refusal(call.shape("self"))


COMPOSED: Table = table(
    {
        "addcmul": function(_addcmul, _addcmul_refusal, clamps=True),
        "log_softmax.int _log_softmax": function(_log_softmax, _log_softmax_refusal, wide=True),
        "glu": function(
            _glu, _glu_refusal, integers=Integers.CHOOSES, scale_refusal=_glu_scale_refusal
        ),
        "repeat tile": move(_repeat, _repeat_refusal, integers=Integers.NEVER),
        "repeat_interleave.self_int": move(
            _repeat_interleave, _repeat_interleave_refusal, integers=Integers.NEVER
        ),
        "roll": move(_roll, _roll_refusal, integers=Integers.NEVER),
    }
)
