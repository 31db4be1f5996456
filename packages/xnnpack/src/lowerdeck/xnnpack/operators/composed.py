"""Operators that XNNPACK lacks, written with those that it has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.types import IntLikeType as Dim

from lowerdeck.xnnpack.emit import Call, Emission, Tracked, broadcast, is_fixed, shape_of
from lowerdeck.xnnpack.operators.arithmetic import scale_refusal
from lowerdeck.xnnpack.operators.clamps import following_clamp
from lowerdeck.xnnpack.operators.contract import Integers, Operator, Scales, Table
from lowerdeck.xnnpack.operators.elementwise import UNIT
from lowerdeck.xnnpack.operators.maxima import largest_of_rows
from lowerdeck.xnnpack.operators.pieces import stretch
from lowerdeck.xnnpack.payload.encoding import Encoding
from lowerdeck.xnnpack.payload.schema import NONE, NodeKind

_aten = torch.ops.aten


def _addcmul(emission: Emission, call: Call) -> None:
    base, left, right = (emission.of(call.args[name]) for name in ("self", "tensor1", "tensor2"))
    if call.args["value"] != 1:
        # Scaling a constant costs nothing, and the smaller of two less than the larger.
        left, right = sorted((left, right), key=lambda one: (not one.is_constant, len(one.shape)))
        left = _times(emission, left, float(call.args["value"]))
    shape = shape_of(call.node)
    rank = len(shape)
    layout = emission.common_layout(base, left, right, rank=rank)
    product = broadcast(left.shape, right.shape)
    value = emission.add(
        NodeKind.MULTIPLY,
        (*(1,) * (rank - len(product)), *product),
        layout,
        input1_id=emission.aligned(left, rank, layout),
        input2_id=emission.aligned(right, rank, layout),
    )
    last, limits = following_clamp(call.node)
    value = emission.add(
        NodeKind.ADD,
        shape,
        layout,
        limits,
        input1_id=emission.aligned(base, rank, layout),
        input2_id=value,
    )
    emission.define_value(last, value, layout)


def _times(emission: Emission, tracked: Tracked, factor: float) -> Tracked:
    if tracked.tensor is not None:
        return Tracked(tracked.shape, tracked.tensor * factor)
    layout = tracked.preferred
    value = emission.add(
        NodeKind.MULTIPLY,
        tracked.shape,
        layout,
        input1_id=emission.id_of(tracked, layout),
        input2_id=emission.id_of(emission.scalar(factor)),
    )
    return emission.tracked(tracked.shape, value, layout)


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
    shape = tracked.shape
    rows, columns = (*shape[:-1], 1), int(shape[-1])
    value = emission.id_of(tracked)
    largest = largest_of_rows(emission, value, shape)
    moved = emission.add(NodeKind.SUBTRACT, shape, input1_id=value, input2_id=largest)
    total = emission.add(
        NodeKind.FULLY_CONNECTED,
        rows,
        input1_id=emission.add(NodeKind.EXP, shape, input_id=moved),
        filter_id=emission.constant_value(torch.ones(1, columns), packed=True),
        bias_id=NONE,
    )
    total = emission.add(NodeKind.LOG, rows, input_id=total)
    result = emission.add(NodeKind.SUBTRACT, shape, input1_id=moved, input2_id=total)
    emission.define_value(call.node, result)


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
            layout = tracked.preferred
            value = emission.add(
                NodeKind.CONCATENATE2,
                tracked.shape,
                layout,
                None,
                axis=layout.position(axis, len(tracked.shape)),
                input1_id=emission.id_of(pieces[0], layout),
                input2_id=emission.id_of(pieces[1], layout),
            )
            tracked = emission.tracked(tracked.shape, value, layout)
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
    shape, layout = shape_of(call.node), tracked.preferred
    half = int(shape[axis])
    integers = emission.writes.is_int8
    with _made_as(emission, tracked.encoding if integers else None):
        first, second = (stretch(emission, tracked, axis, start, half) for start in (0, half))
    with _made_as(emission, UNIT if integers else None):
        gate = emission.add(
            NodeKind.SIGMOID, shape, layout, input_id=emission.id_of(second, layout)
        )
    value = emission.add(
        NodeKind.MULTIPLY,
        shape,
        layout,
        input1_id=emission.id_of(first, layout),
        input2_id=gate,
    )
    emission.define_value(call.node, value, layout)


def _made_as(emission: Emission, encoding: Encoding | None) -> AbstractContextManager[None]:
    """Let results have an encoding, None for that of the call."""
    return nullcontext() if encoding is None else emission.stored(None, encoding)


def _glu_scale_refusal(call: Call, scales: Scales) -> str | None:
    source, result = scales.inputs[0], scales.result
    # Half a step of the sigmoid, 1/512, times what it is multiplied by, must be less than a step
    # of the result: the two then round to neighbours at most.
    if max(source.zero_point + 128, 127 - source.zero_point) * source.scale > 500 * result.scale:
        return "its result is much finer than its input is wide"
    return scale_refusal(NodeKind.MULTIPLY, call, Scales((source, UNIT), result))


def _glu_refusal(call: Call) -> str | None:
    return None if is_fixed(call.shape("self")[call.axis()]) else "it cuts a symbolic size"


def _repeat(emission: Emission, call: Call) -> None:
    """Repeat along one dimension after the other: only arithmetic repeats, by broadcasting."""
    tracked = emission.of(call.args["self"])
    times = _times_repeated(call)
    shape: tuple[Dim, ...] = (*(1,) * (len(times) - len(tracked.shape)), *tracked.shape)
    value = emission.reshaped(emission.id_of(tracked), shape)
    for axis, many in enumerate(times):
        if many > 1:
            value, shape = _repeated(emission, value, shape, axis, many, each=False)
    emission.define_value(call.node, value)


def _times_repeated(call: Call) -> list[int]:
    times = list(call.args["repeats" if "repeats" in call.args else "dims"])
    return [*[1] * (call.rank("self") - len(times)), *times]


def _repeat_interleave(emission: Emission, call: Call) -> None:
    tracked, many = emission.of(call.args["self"]), int(call.args["repeats"])
    value, shape = emission.id_of(tracked), tracked.shape
    if many > 1:
        value, shape = _repeated(emission, value, shape, call.axis(), many, each=True)
    emission.define(call.node, emission.tracked(shape, value))


def _repeated(
    emission: Emission, value: int, shape: Sequence[Dim], axis: int, many: int, *, each: bool
) -> tuple[int, tuple[Dim, ...]]:
    """Return a value of which one dimension is repeated, as a whole or each index of it."""
    before, size, after = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
    apart = (before, size, 1, after) if each else (before, 1, size, after)
    ones = [1, 1, many, 1] if each else [1, many, 1, 1]
    wide = tuple(many if factor == many else one for one, factor in zip(apart, ones, strict=True))
    value = emission.add(
        NodeKind.MULTIPLY,
        wide,
        input1_id=emission.reshaped(value, apart),
        input2_id=emission.constant_value(torch.ones(ones)),
    )
    result = (*shape[:axis], size * many, *shape[axis + 1 :])
    return emission.reshaped(value, result), result


def _repeat_refusal(call: Call) -> str | None:
    if not all(isinstance(many, int) for many in _times_repeated(call)):
        return "it repeats elements a symbolic number of times"
    return _one_symbol(call)


def _repeat_interleave_refusal(call: Call) -> str | None:
    if not isinstance(call.args["repeats"], int):
        return "it repeats elements a symbolic number of times"
    if call.args["dim"] is None or not call.rank("self"):
        return "it flattens what it repeats"
    return _one_symbol(call)


def _one_symbol(call: Call) -> str | None:
    if sum(not is_fixed(size) for size in call.shape("self")) > 1:
        return "more than one symbolic size, which a reshape cannot carry"
    return None


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
        Operator(_repeat, _repeat_refusal, computes=False),
    ),
    _aten.repeat_interleave.self_int: Operator(
        _repeat_interleave, _repeat_interleave_refusal, computes=False
    ),
    _aten.roll.default: Operator(_roll, _roll_refusal, computes=False),
}
