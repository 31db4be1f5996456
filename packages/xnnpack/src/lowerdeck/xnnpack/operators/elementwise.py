"""Functions of one tensor, element by element."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.fx import Node

from lowerdeck.xnnpack.emit import MOST_RESCALED, Call, Emission, Range, Tracked
from lowerdeck.xnnpack.operators.arithmetic import scale_refusal
from lowerdeck.xnnpack.operators.contract import (
    FloatNeededError,
    Integers,
    Operator,
    Scales,
    Table,
)
from lowerdeck.xnnpack.payload.encoding import Encoding, int8
from lowerdeck.xnnpack.payload.layout import Layout
from lowerdeck.xnnpack.payload.schema import NodeKind

_aten = torch.ops.aten


class Elementwise:
    """Adds nodes that all have the shape and the layout of one tensor.

    Args:
        emission: Where to add.
        tracked: The tensor.
    """

    def __init__(self, emission: Emission, tracked: Tracked) -> None:
        self.emission = emission
        self.shape: tuple[int | torch.SymInt, ...] = tracked.shape
        self.layout: Layout = tracked.preferred
        self.input: int = emission.id_of(tracked, self.layout)

    def unary(self, kind: NodeKind, value: int, **fields: float) -> int:
        """Return the value of a function of ``value``."""
        return self.emission.add(kind, self.shape, self.layout, None, input_id=value, **fields)

    def binary(
        self, kind: NodeKind, left: int, right: int | float, limits: Range | None = None
    ) -> int:
        """Return the value of two values, or of a value and a float."""
        if isinstance(right, float):
            right = self.emission.id_of(self.emission.scalar(right))
        return self.emission.add(
            kind, self.shape, self.layout, limits, input1_id=left, input2_id=right
        )


def _direct(kind: NodeKind) -> Operator:
    return Operator(_composed(lambda x, _: x.unary(kind, x.input)), integers=Integers.CHOOSES)


def _composed(build: Callable[[Elementwise, Call], int]) -> Callable[[Emission, Call], None]:
    def emit(emission: Emission, call: Call) -> None:
        name = "self" if "self" in call.args else "input"
        tracked = emission.of(call.args[name])
        value = build(Elementwise(emission, tracked), call)
        emission.define_value(call.node, value, tracked.preferred)

    return emit


def _gelu(x: Elementwise, call: Call) -> int:
    if call.args["approximate"] == "none":
        return x.unary(NodeKind.GELU, x.input)
    # XNNPACK's own is the exact one: x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3)))
    square = x.unary(NodeKind.SQUARE, x.input)
    scale = math.sqrt(2 / math.pi)
    slope = x.binary(NodeKind.ADD, x.binary(NodeKind.MULTIPLY, square, scale * 0.044715), scale)
    tanh = x.unary(NodeKind.TANH, x.binary(NodeKind.MULTIPLY, x.input, slope))
    half = x.binary(NodeKind.MULTIPLY, x.input, 0.5)
    return x.binary(NodeKind.MULTIPLY, half, x.binary(NodeKind.ADD, tanh, 1.0))


def _silu(x: Elementwise, _: Call) -> int:
    if not x.emission.writes.is_int8:
        return x.binary(NodeKind.MULTIPLY, x.input, x.unary(NodeKind.SIGMOID, x.input))
    with x.emission.stored(None, UNIT):
        sigmoid = x.unary(NodeKind.SIGMOID, x.input)
    return x.binary(NodeKind.MULTIPLY, x.input, sigmoid)


def _silu_scale_refusal(call: Call, scales: Scales) -> str | None:
    source, result = scales.inputs[0], scales.result
    # Half a step of the sigmoid, 1/512, times an input whose result is no end of the range, must
    # be less than a step of the result: the two then round to neighbours at most. Inputs above
    # 255 steps of it are such an end, those below are not.
    if (source.zero_point + 128) * source.scale > 500 * result.scale:
        return "its input goes further down than its result goes up"
    return scale_refusal(NodeKind.MULTIPLY, call, Scales((source, UNIT), result))


def _hardsigmoid(x: Elementwise, _: Call) -> int:
    if not x.emission.writes.is_int8:
        scaled = x.binary(NodeKind.MULTIPLY, x.input, 1 / 6)
    else:
        with x.emission.stored(None, _HALF_UNIT):
            scaled = x.binary(NodeKind.MULTIPLY, x.input, 1 / 6)
    return x.binary(NodeKind.ADD, scaled, 0.5, (0.0, 1.0))


def _hardsigmoid_scale_refusal(call: Call, scales: Scales) -> str | None:
    source, result = scales.inputs[0], scales.result
    if result.scale < _HALF_UNIT.scale:
        return "its result is finer than what it is computed of"
    sixth, half = int8(1 / 6 / 127), int8(0.5 / 127)
    return scale_refusal(
        NodeKind.MULTIPLY, call, Scales((source, sixth), _HALF_UNIT)
    ) or scale_refusal(NodeKind.ADD, call, Scales((_HALF_UNIT, half), result))


def _leaky_relu(x: Elementwise, call: Call) -> int:
    return x.unary(NodeKind.LEAKY_RELU, x.input, negative_slope=float(call.args["negative_slope"]))


def _elu(x: Elementwise, call: Call) -> int:
    alpha, scale, within = _elu_numbers(call)
    value = x.input if within == 1 else x.binary(NodeKind.MULTIPLY, x.input, within)
    value = x.unary(NodeKind.ELU, value, alpha=alpha * within)
    # What is positive was multiplied by the scale of the exponent, too.
    return value if scale == within else x.binary(NodeKind.MULTIPLY, value, scale / within)


def _elu_numbers(call: Call) -> tuple[float, float, float]:
    """Return the factor of what is negative, that of all, and that of the exponent."""
    args = call.args
    if "selu" in str(call.node.target):
        return 1.6732632423543772, 1.0507009873554805, 1.0
    if "celu" in str(call.node.target):
        return float(args["alpha"]), 1.0, 1 / float(args["alpha"])
    return float(args["alpha"]), float(args["scale"]), float(args["input_scale"])


def _elu_refusal(call: Call) -> str | None:
    if call.args.get("alpha", 1) == 0 or not _elu_numbers(call)[2] > 0:
        return "its exponent is not scaled by a positive number"
    return None


def _elu_int8_refusal(call: Call) -> str | None:
    return None if _elu_numbers(call)[1:] == (1, 1) else "it takes several nodes"


def _mish(x: Elementwise, _: Call) -> int:
    # tanh(log(1 + e)) is n / (n + 2) with n = e (e + 2); from 20 on that is 1.
    e = x.unary(NodeKind.EXP, x.binary(NodeKind.MINIMUM, x.input, 20.0))
    n = x.binary(NodeKind.MULTIPLY, e, x.binary(NodeKind.ADD, e, 2.0))
    share = x.binary(NodeKind.DIV, n, x.binary(NodeKind.ADD, n, 2.0))
    return x.binary(NodeKind.MULTIPLY, x.input, share)


def _softplus(x: Elementwise, call: Call) -> int:
    """Add ``max(x, 0) + log(1 + t)`` with ``t = exp(-|x|)``, whose logarithm is a series."""
    beta = float(call.args["beta"])
    scaled = x.input if beta == 1 else x.binary(NodeKind.MULTIPLY, x.input, beta)
    t = x.unary(NodeKind.EXP, x.unary(NodeKind.NEGATE, x.unary(NodeKind.ABS, scaled)))
    # log(1 + t) = 2 (z + z^3/3 + z^5/5 ...) with z = t / (2 + t), at most a third: the logarithm
    # of a sum with 1 would lose what is small.
    z = x.binary(NodeKind.DIV, t, x.binary(NodeKind.ADD, t, 2.0))
    square = x.unary(NodeKind.SQUARE, z)
    series = x.binary(NodeKind.MULTIPLY, square, 1 / 13)
    for odd in (11, 9, 7, 5, 3):
        series = x.binary(NodeKind.ADD, series, 1 / odd)
        series = x.binary(NodeKind.MULTIPLY, series, square)
    logarithm = x.binary(NodeKind.MULTIPLY, x.binary(NodeKind.ADD, series, 1.0), z)
    logarithm = x.binary(NodeKind.MULTIPLY, logarithm, 2 / beta)
    return x.binary(NodeKind.ADD, logarithm, x.binary(NodeKind.MAXIMUM, x.input, 0.0))


def _softplus_refusal(call: Call) -> str | None:
    if not call.args["beta"] > 0 or not call.args["threshold"] >= _LINEAR:
        return f"its factor is not positive, or it is made linear before {_LINEAR}"
    return None


def _sqrt(x: Elementwise, call: Call) -> int:
    value = x.input
    if call.node.meta["val"].dtype is torch.float16:
        # XNNPACK's gives NaN for infinity, which a square of 256 is in float16; the root of this
        # bound is one there.
        limits = (-math.inf, 1e30)
        value = x.emission.add(NodeKind.CLAMP, x.shape, x.layout, limits, input_id=value)
    return x.unary(NodeKind.SQUARE_ROOT, value)


def _rsqrt(x: Elementwise, call: Call) -> int:
    # XNNPACK's own gives NaN for 0, of which models take the infinity out again (a node of a
    # graph without neighbours); norms keep 0 away by a small number, and the one node.
    if _is_above_zero(call.node.args[0]):
        return x.unary(NodeKind.RECIPROCAL_SQUARE_ROOT, x.input)
    one = x.emission.id_of(x.emission.scalar(1.0))
    return x.binary(NodeKind.DIV, one, _sqrt(x, call))


def _is_above_zero(node: object) -> bool:
    """Return whether a node adds a positive number to what is never negative."""
    if not isinstance(node, Node) or node.target not in _ADDITIONS or len(node.args) < 2:
        return False
    source, number = node.args[:2]
    while isinstance(source, Node) and source.target in _MEANS:
        source = source.args[0]
    return bool(
        isinstance(number, (int, float))
        and number > 0
        and node.kwargs.get("alpha", 1) == 1
        and isinstance(source, Node)
        and _is_square(source)
    )


def _is_square(node: Node) -> bool:
    if node.target is _aten.pow.Tensor_Scalar:
        return bool(node.args[1] == 2)
    if node.target in (_aten.square.default, _aten.abs.default):
        return True
    return node.target is _aten.mul.Tensor and node.args[0] is node.args[1]


_LINEAR = 17
"""From here on a softplus is its input, in float32."""
UNIT = int8(1 / 256, -128)
"""How numbers from 0 to 1 are stored as integers."""
_HALF_UNIT = int8(1 / 256)
"""How numbers from -0.5 to 0.5 are stored: what is beyond becomes the ends."""
_ADDITIONS = frozenset({_aten.add.Tensor, _aten.add.Scalar})
_MEANS = frozenset({_aten.mean.dim, _aten.mean.default, _aten.sum.dim_IntList, _aten.sum.default})
_POWERS: dict[float, Callable[[Elementwise, Call], int]] = {
    1.0: lambda x, _: x.unary(NodeKind.COPY, x.input),
    2.0: lambda x, _: x.unary(NodeKind.SQUARE, x.input),
    3.0: lambda x, _: x.binary(NodeKind.MULTIPLY, x.unary(NodeKind.SQUARE, x.input), x.input),
    0.5: _sqrt,
    -0.5: _rsqrt,
}


def _pow_refusal(call: Call) -> str | None:
    exponent = call.args["exponent"]
    if not isinstance(exponent, (int, float)) or float(exponent) not in _POWERS:
        return f"the exponent must be one of {', '.join(map(str, sorted(_POWERS)))}"
    return None


def _reciprocal(emission: Emission, call: Call) -> None:
    tracked = emission.of(call.args["self"])
    layout = tracked.preferred
    value = emission.add(
        NodeKind.DIV,
        tracked.shape,
        layout,
        input1_id=emission.id_of(emission.scalar(1.0)),
        input2_id=emission.id_of(tracked, layout),
    )
    emission.define_value(call.node, value, layout)


def _prelu(emission: Emission, call: Call) -> None:
    tracked, slope = emission.of(call.args["self"]), emission.of(call.args["weight"])
    rank = len(tracked.shape)
    layout = Layout.CHANNELS_LAST if rank == 4 else tracked.preferred
    data = emission.constant(call.args["weight"]) if slope.is_constant else None
    if data is None:
        slope_id = emission.id_of(slope)
    else:
        encoding = _slope_encoding(emission, tracked, data)
        if data.numel() == 1 or rank < 2:
            data = data.reshape(1)
        else:
            wide = data.reshape(1, -1, *(1,) * (rank - 2))
            data = wide.permute(layout.permutation(rank))
        slope_id = emission.constant_value(data, encoding=encoding)
    value = emission.add(
        NodeKind.PRELU,
        tracked.shape,
        layout,
        input1_id=emission.id_of(tracked, layout),
        input2_id=slope_id,
    )
    emission.define_value(call.node, value, layout)


def _slope_encoding(emission: Emission, tracked: Tracked, slope: torch.Tensor) -> Encoding | None:
    """Return how slopes are stored beside integers; None beside floats, as these are."""
    if not emission.writes.is_int8:
        return None
    source, largest = tracked.encoding, float(slope.abs().max())
    least = (source.zero_point + 128) * source.scale
    # A single slope is the largest of 8 bits, exactly; of several, each is half a step off.
    if slope.numel() > 1 and least * largest / 254 >= emission.writes.scale:
        raise FloatNeededError("its slopes, in 8 bits, would make its result a step wrong")
    return int8(largest / 127 if largest else 1.0)


def _prelu_refusal(call: Call) -> str | None:
    return None if call.is_constant("weight") else "its slope is not constant"


def _leaky_scale_refusal(call: Call, scales: Scales) -> str | None:
    ratio = scales.inputs[0].scale / scales.result.scale
    if ratio * max(1.0, abs(float(call.args["negative_slope"]))) > MOST_RESCALED:
        return f"its input is more than {MOST_RESCALED} times coarser than its result"
    return None


def _gelu_int8_refusal(call: Call) -> str | None:
    return None if call.args["approximate"] == "none" else "XNNPACK's gelu is the exact one"


def _pow_int8_refusal(call: Call) -> str | None:
    return None if call.args["exponent"] in (2, 0.5) else "it takes several nodes"


_KINDS = {
    _aten.abs.default: NodeKind.ABS,
    _aten.ceil.default: NodeKind.CEILING,
    _aten.cos.default: NodeKind.COS,
    _aten.exp.default: NodeKind.EXP,
    _aten.floor.default: NodeKind.FLOOR,
    _aten.hardswish.default: NodeKind.HARDSWISH,
    _aten.log.default: NodeKind.LOG,
    _aten.neg.default: NodeKind.NEGATE,
    _aten.sigmoid.default: NodeKind.SIGMOID,
    _aten.sin.default: NodeKind.SIN,
    _aten.square.default: NodeKind.SQUARE,
    _aten.tanh.default: NodeKind.TANH,
}
_ELU = Operator(
    _composed(_elu),
    _elu_refusal,
    integers=Integers.CHOOSES,
    int8_refusal=_elu_int8_refusal,
)
ELEMENTWISE: Table = {
    **{op: _direct(kind) for op, kind in _KINDS.items()},
    # In float16 the runtime's gives NaN for -0.0 and infinity, and -0.0 for numbers below it.
    _aten.sqrt.default: Operator(_composed(_sqrt), integers=Integers.CHOOSES, wide=True),
    **dict.fromkeys([_aten.elu.default, _aten.celu.default, _aten.selu.default], _ELU),
    _aten.softplus.default: Operator(_composed(_softplus), _softplus_refusal, wide=True),
    _aten.mish.default: Operator(_composed(_mish), wide=True),
    _aten.gelu.default: Operator(
        _composed(_gelu),
        integers=Integers.CHOOSES,
        int8_refusal=_gelu_int8_refusal,
        wide=True,
    ),
    _aten.hardsigmoid.default: Operator(
        _composed(_hardsigmoid),
        integers=Integers.CHOOSES,
        scale_refusal=_hardsigmoid_scale_refusal,
    ),
    _aten.leaky_relu.default: Operator(
        _composed(_leaky_relu), integers=Integers.CHOOSES, scale_refusal=_leaky_scale_refusal
    ),
    _aten.pow.Tensor_Scalar: Operator(
        _composed(lambda x, call: _POWERS[float(call.args["exponent"])](x, call)),
        _pow_refusal,
        integers=Integers.CHOOSES,
        int8_refusal=_pow_int8_refusal,
        wide=True,
    ),
    **dict.fromkeys(
        [_aten.prelu.default, _aten._prelu_kernel.default],
        Operator(_prelu, _prelu_refusal, integers=Integers.CHOOSES, packs=("weight",)),
    ),
    _aten.reciprocal.default: Operator(_reciprocal),
    _aten.rsqrt.default: Operator(_composed(_rsqrt), wide=True),
    _aten.silu.default: Operator(
        _composed(_silu), integers=Integers.CHOOSES, scale_refusal=_silu_scale_refusal
    ),
}
