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
from lowerdeck.xnnpack.operators.clamps import following_clamp
from lowerdeck.xnnpack.operators.contract import Integers, Operator, Scales, Table, move
from lowerdeck.xnnpack.operators.elementwise import UNIT
from lowerdeck.xnnpack.operators.images import largest_of_rows
from lowerdeck.xnnpack.operators.normalization import weighted_sums
from lowerdeck.xnnpack.operators.pieces import stretch

_aten = torch.ops.aten


def _addcmul(emission: Emission, call: Call) -> None:
    base, left, right = (emission.of(call.args[name]) for name in ("self", "tensor1", "tensor2"))
    if call.args["value"] != 1:
        # Scaling a constant costs nothing, and the smaller of two less than the larger.
        left, right = sorted((left, right), key=lambda one: (not one.is_constant, len(one.shape)))
        left = scaled(emission, left, float(call.args["value"]))
    shape = shape_of(call.node)
    rank = len(shape)
    layout = emission.common_layout(base, left, right, rank=rank)
    sizes = broadcast(left.shape, right.shape)
    value = emission.add(
        XnnOperator.MULTIPLY,
        (*(1,) * (rank - len(sizes)), *sizes),
        layout,
        input1_id=emission.aligned(left, rank, layout),
        input2_id=emission.aligned(right, rank, layout),
    )
    last, limits = following_clamp(call.node)
    value = emission.add(
        XnnOperator.ADD,
        shape,
        layout,
        limits,
        input1_id=emission.aligned(base, rank, layout),
        input2_id=value,
    )
    emission.define_value(last, value, layout)


def _addcmul_refusal(call: Call) -> str | None:
    if not isinstance(call.args["value"], (int, float)):
        return "its factor is not a plain number"
    names = ("tensor1", "tensor2")
    if not all(is_fixed(size) for name in names for size in call.shape(name)):
        return "its product has symbolic sizes"
    return None


def _log_softmax(emission: Emission, call: Call) -> None:
    """Add ``x - max - log(sum(exp(x - max)))``: the logarithm of a softmax would lose its tail."""
    tracked = emission.of(call.args["self"])
    rows = emission.plain(tracked)
    moved = emission.binary(XnnOperator.SUBTRACT, rows, largest_of_rows(emission, rows))
    ones = torch.ones(1, int(tracked.shape[-1]))
    total = weighted_sums(emission, emission.unary(XnnOperator.EXP, moved), ones)
    total = emission.unary(XnnOperator.LOG, total)
    emission.define(call.node, emission.binary(XnnOperator.SUBTRACT, moved, total))


def _log_softmax_refusal(call: Call) -> str | None:
    shape = call.shape("self")
    if call.args.get("half_to_float") or call.args.get("dtype") is not None:
        return "it changes the dtype"
    if not shape or call.axis() != len(shape) - 1:
        return "it is not along the last dimension"
    return None if all(map(is_fixed, shape)) else "it has symbolic sizes"


def _roll(emission: Emission, call: Call) -> None:
    tracked = emission.of(call.args["self"])
    for shift, dim in zip(call.args["shifts"], call.args["dims"], strict=True):
        axis = dim % len(tracked.shape)
        size = int(tracked.shape[axis])
        start = -shift % size
        if start:
            pieces = [
                stretch(emission, tracked, axis, first, count)
                for first, count in ((start, size - start), (0, start))
            ]
            tracked = joined(emission, pieces, axis, tracked.preferred)
    emission.define(call.node, tracked)


def _roll_refusal(call: Call) -> str | None:
    shifts, dims = call.args["shifts"], call.args["dims"]
    if len(shifts) != len(dims):
        return "it rolls the flattened tensor"
    if not all(isinstance(shift, int) for shift in shifts):
        return "it rolls by a symbolic number"
    if not all(is_fixed(call.shape("self")[dim]) for dim in dims):
        return "it rolls a symbolic size"
    return None


def _glu(emission: Emission, call: Call) -> None:
    tracked, axis = emission.of(call.args["self"]), call.axis()
    half = int(tracked.shape[axis]) // 2
    integers = emission.writes.is_int8
    with emission.made_as(tracked.encoding if integers else None):
        first, second = (stretch(emission, tracked, axis, start, half) for start in (0, half))
    with emission.made_as(UNIT if integers else None):
        gate = emission.unary(XnnOperator.SIGMOID, second)
    emission.define(call.node, emission.binary(XnnOperator.MULTIPLY, first, gate))


def _glu_scale_refusal(call: Call, scales: Scales) -> str | None:
    source, result = scales.inputs[0], scales.result
    # Half a step of the sigmoid, 1/512, times what it is multiplied by, must be less than a step
    # of the result: the two then round to neighbours at most.
    if max(source.zero_point + 128, 127 - source.zero_point) * source.scale > 500 * result.scale:
        return "its result is much finer than its input is wide"
    return scale_refusal(XnnOperator.MULTIPLY, call, Scales((source, UNIT), result))


def _glu_refusal(call: Call) -> str | None:
    return None if is_fixed(call.shape("self")[call.axis()]) else "it cuts a symbolic size"


def _repeat(emission: Emission, call: Call) -> None:
    """Repeat along one dimension after the other: only arithmetic repeats, by broadcasting."""
    tracked = emission.of(call.args["self"])
    times = _times_repeated(call)
    tracked = emission.view(tracked, (*(1,) * (len(times) - len(tracked.shape)), *tracked.shape))
    for axis, many in enumerate(times):
        if many > 1:
            tracked = _repeated(emission, tracked, axis, many, each=False)
    emission.define(call.node, tracked)


def _times_repeated(call: Call) -> list[int]:
    times = list(call.args["repeats" if "repeats" in call.args else "dims"])
    return [*[1] * (call.rank("self") - len(times)), *times]


def _repeat_interleave(emission: Emission, call: Call) -> None:
    tracked, many = emission.of(call.args["self"]), int(call.args["repeats"])
    if many > 1:
        tracked = _repeated(emission, tracked, call.axis(), many, each=True)
    emission.define(call.node, emission.plain(tracked))


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


_LOG_SOFTMAX = Operator(_log_softmax, _log_softmax_refusal, wide=True)
COMPOSED: Table = {
    _aten.addcmul.default: Operator(_addcmul, _addcmul_refusal, clamps=True),
    _aten._log_softmax.default: _LOG_SOFTMAX,
    _aten.log_softmax.int: _LOG_SOFTMAX,
    _aten.glu.default: Operator(
        _glu, _glu_refusal, integers=Integers.CHOOSES, scale_refusal=_glu_scale_refusal
    ),
    **dict.fromkeys(
        [_aten.repeat.default, _aten.tile.default],
        move(_repeat, _repeat_refusal, integers=Integers.NEVER),
    ),
    _aten.repeat_interleave.self_int: move(
        _repeat_interleave, _repeat_interleave_refusal, integers=Integers.NEVER
    ),
    _aten.roll.default: move(_roll, _roll_refusal, integers=Integers.NEVER),
}
