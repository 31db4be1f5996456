"""Constant, reflection, replication and circular padding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

from lowerdeck.xnnpack.emit import Call, Emission, Tracked, is_fixed, named
from lowerdeck.xnnpack.operators.choosing import choice_refusal, chosen
from lowerdeck.xnnpack.operators.contract import Integers, Scales, Table, function, move
from lowerdeck.xnnpack.operators.convolution import CONVOLUTIONS
from lowerdeck.xnnpack.payload import Layout


def _pad(e: Emission, x: Tracked, call: Call) -> Tracked:
    if _mode(call) != "constant":
        return _repeat(e, x, call)
    rank, layout = len(x.shape), x.preferred
    if rank in (3, 4) and all(user.target in CONVOLUTIONS for user in call.node.users):
        layout = (
            Layout.CHANNELS_LAST
        )  # the layout of convolutions, which padding may be fused into
    before, after = [0] * rank, [0] * rank
    for axis, first, last in _pairs(call):
        if min(first, last) < 0:
            cut = max(-first, 0), max(-last, 0)
            x = e.sliced(x, axis, cut[0], int(x.shape[axis]) - sum(cut))
        before[axis], after[axis] = max(first, 0), max(last, 0)
    return e.padded(x, before, after, float(call.args["value"] or 0), layout)


def _pairs(call: Call) -> Iterator[tuple[int, int, int]]:
    """Yield each dimension that may be padded, and the amounts before and after it."""
    amounts: list[int] = call.args["pad"]
    for number, (first, last) in enumerate(zip(amounts[::2], amounts[1::2], strict=True)):
        yield call.rank() - 1 - number, first, last


def _pad_refusal(call: Call) -> str | None:
    if _mode(call) != "constant":
        return _repeat_refusal(call)
    plain = isinstance(call.args["value"], (int, float, type(None)))
    if not all(isinstance(amount, int) for amount in _amounts(call)):
        return "an amount of padding is symbolic"
    for axis, first, last in _pairs(call):
        size, removed = call.shape()[axis], max(-first, 0) + max(-last, 0)
        if removed and not (is_fixed(size) and removed < int(size)):
            return "it removes all elements of a dimension, or some of a dynamic dimension"
    return None if plain else "its value is not a plain number"


def _amounts_refusal(call: Call) -> str | None:
    fixed = all(isinstance(amount, int) and amount >= 0 for amount in _amounts(call))
    return None if fixed else "an amount of padding is negative or symbolic"


def _pad_scale_refusal(call: Call, scales: Scales) -> str | None:
    number = float(call.args["value"] or 0)
    steps = number / scales.result.scale + scales.result.zero_point
    if not math.isfinite(steps) or steps != round(steps) or not -128 <= steps <= 127:
        return f"its value {number} is not representable at its input's scale"
    return None


_MODES: Mapping[str, Callable[[int, int], int]] = {
    "reflect": lambda index, size: size - 1 - abs(size - 1 - abs(index)),
    "replicate": lambda index, size: min(max(index, 0), size - 1),
    "circular": lambda index, size: index % size,
}
"""Source index for an index outside of a dimension, by the mode of ``aten.pad``."""
_MODES_OF: Mapping[object, str] = {
    **dict.fromkeys(named("reflection_pad1d reflection_pad2d reflection_pad3d"), "reflect"),
    **dict.fromkeys(named("replication_pad1d replication_pad2d replication_pad3d"), "replicate"),
    **dict.fromkeys(named("_pad_circular"), "circular"),
}


def _mode(call: Call) -> str:
    return _MODES_OF.get(call.node.target) or str(call.args.get("mode", "constant"))


def _amounts(call: Call) -> list[int]:
    amounts: list[int] = call.args["padding" if "padding" in call.args else "pad"]
    return amounts


def _repeated(call: Call) -> Iterator[tuple[int, list[int]]]:
    """Yield each padded dimension, and its source indices."""
    shape, amounts, element = call.shape("self"), _amounts(call), _MODES[_mode(call)]
    for number in range(len(amounts) // 2):
        axis = len(shape) - 1 - number
        before, after = amounts[2 * number : 2 * number + 2]
        if before or after:
            size = int(shape[axis])
            yield axis, [element(index, size) for index in range(-before, size + after)]


def _repeat(e: Emission, x: Tracked, call: Call) -> Tracked:
    for axis, indices in _repeated(call):
        x = chosen(e, x, axis, indices)
    return x


def _repeat_refusal(call: Call) -> str | None:
    shape, amounts = call.shape("self"), _amounts(call)
    if _mode(call) not in _MODES:
        return f"its padding has the mode {_mode(call)!r}"
    reason = _amounts_refusal(call)
    for number, size in enumerate(reversed(shape[len(shape) - len(amounts) // 2 :])):
        if not reason and any(amounts[2 * number : 2 * number + 2]) and not is_fixed(size):
            reason = "it pads a symbolic size with its elements"
    many = () if reason else (choice_refusal(shape, indices) for _, indices in _repeated(call))
    return reason or next(filter(None, many), None)


_PAD = function(_pad, _pad_refusal, integers=Integers.KEEPS, scale_refusal=_pad_scale_refusal)
PADDING: Table = {
    **dict.fromkeys(named("constant_pad_nd pad"), _PAD),
    **dict.fromkeys(_MODES_OF, move(_repeat, _repeat_refusal)),
}
