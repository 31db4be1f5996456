"""Elementwise functions of one tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

from lowerdeck.serializer import XnnEncoding, XnnOperator
from lowerdeck.xnnpack.emit import MOST_RESCALED, Call, Emission, Tracked
from lowerdeck.xnnpack.operators.arithmetic import scale_refusal
from lowerdeck.xnnpack.operators.contract import (
    Build,
    FloatNeededError,
    Integers,
    Operator,
    Refusal,
    Scales,
    Table,
    constants,
    function,
    table,
)
from lowerdeck.xnnpack.operators.results import LIMIT_NAMES, LIMITS, clamp_range
from lowerdeck.xnnpack.payload import Layout, int8

_aten = torch.ops.aten


_add = XnnOperator.ADD
_mul = XnnOperator.MULTIPLY


def _on_integers(build: Build, *refusals: Refusal, **options: Any) -> Operator:
    return function(build, *refusals, integers=Integers.CHOOSES, **options)


_DIRECT: Mapping[str, XnnOperator] = {
    name: XnnOperator[name.upper()]
    for name in (
        *("abs", "cos", "exp", "floor", "hardswish"),
        *("log", "sigmoid", "sin", "square", "tanh"),
    )
} | {"ceil": XnnOperator.CEILING, "neg": XnnOperator.NEGATE}
"""Functions that map to one node."""


def _direct(kind: XnnOperator) -> Operator:
    return _on_integers(lambda e, x, _: e.unary(kind, x))


def _gelu(e: Emission, x: Tracked, call: Call) -> Tracked:
    if call.args["approximate"] == "none":
        return e.unary(XnnOperator.GELU, x)
    # XNNPACK's GELU is exact. The tanh approximation is x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715
    # x^3))).
    scale = math.sqrt(2 / math.pi)
    slope = e.binary(_add, e.binary(_mul, e.unary(XnnOperator.SQUARE, x), scale * 0.044715), scale)
    tanh = e.unary(XnnOperator.TANH, e.binary(_mul, x, slope))
    half = e.binary(_mul, x, 0.5)
    return e.binary(_mul, half, e.binary(_add, tanh, 1.0))


def _silu(e: Emission, x: Tracked, _: Call) -> Tracked:
    with e.made_as(_UNIT if e.writes.is_int8 else None):
        sigmoid = e.unary(XnnOperator.SIGMOID, x)
    return e.binary(_mul, x, sigmoid)


def _silu_scale_refusal(call: Call, scales: Scales) -> str | None:
    source, result = scales.inputs[0], scales.result
    # The sigmoid is rounded by up to 1/512. Times an input whose result does not saturate, this
    # error must be less than a step of the result. Positive inputs above 255 steps of the result
    # saturate; negative ones do not.
    if (source.zero_point + 128) * source.scale > 500 * result.scale:
        return "its negative inputs are too large for the scale of its result"
    return scale_refusal(XnnOperator.MULTIPLY, call, Scales((source, _UNIT), result))


def _hardsigmoid(e: Emission, x: Tracked, _: Call) -> Tracked:
    return e.binary(_add, e.binary(_mul, x, 1 / 6), 0.5, (0.0, 1.0))


def _leaky_relu(e: Emission, x: Tracked, call: Call) -> Tracked:
    return e.unary(XnnOperator.LEAKY_RELU, x, negative_slope=float(call.args["negative_slope"]))


def _elu(e: Emission, x: Tracked, call: Call) -> Tracked:
    alpha, scale, within = _elu_numbers(call)
    scaled = x if within == 1 else e.binary(_mul, x, within)
    value = e.unary(XnnOperator.ELU, scaled, alpha=alpha * within)
    # Undo the scale of the exponent on positive values.
    return value if scale == within else e.binary(_mul, value, scale / within)


def _elu_numbers(call: Call) -> tuple[float, float, float]:
    """Return the factors of negative values, of all values, and of the exponent."""
    args = call.args
    if "selu" in str(call.node.target):
        return 1.6732632423543772, 1.0507009873554805, 1.0
    if "celu" in str(call.node.target):
        return float(args["alpha"]), 1.0, 1 / float(args["alpha"])
    return float(args["alpha"]), float(args["scale"]), float(args["input_scale"])


def _elu_refusal(call: Call) -> str | None:
    if call.args.get("alpha", 1) == 0 or not _elu_numbers(call)[2] > 0:
        return "the factor of its exponent is not positive, or its alpha is 0"
    return None


def _elu_int8_refusal(call: Call) -> str | None:
    return None if _elu_numbers(call)[1:] == (1, 1) else "it takes several nodes"


def _mish(e: Emission, x: Tracked, _: Call) -> Tracked:
    # tanh(log(1 + exp)) is n / (n + 2) with n = exp (exp + 2), which is 1 from 20 on.
    exp = e.unary(XnnOperator.EXP, e.binary(XnnOperator.MINIMUM, x, 20.0))
    n = e.binary(_mul, exp, e.binary(_add, exp, 2.0))
    return e.binary(_mul, x, e.binary(XnnOperator.DIV, n, e.binary(_add, n, 2.0)))


def _softplus(e: Emission, x: Tracked, call: Call) -> Tracked:
    """Add ``max(x, 0) + log(1 + t)`` with ``t = exp(-|x|)``, whose logarithm is a series."""
    beta = float(call.args["beta"])
    scaled = x if beta == 1 else e.binary(_mul, x, beta)
    t = e.unary(XnnOperator.EXP, e.unary(XnnOperator.NEGATE, e.unary(XnnOperator.ABS, scaled)))
    # log(1 + t) = 2 (z + z^3/3 + z^5/5 ...) with z = t / (2 + t), at most a third: the logarithm
    # of a sum with 1 would lose small values.
    z = e.binary(XnnOperator.DIV, t, e.binary(_add, t, 2.0))
    square = e.unary(XnnOperator.SQUARE, z)
    series = e.binary(_mul, square, 1 / 13)
    for odd in (11, 9, 7, 5, 3):
        series = e.binary(_mul, e.binary(_add, series, 1 / odd), square)
    logarithm = e.binary(_mul, e.binary(_mul, e.binary(_add, series, 1.0), z), 2 / beta)
    return e.binary(_add, logarithm, e.binary(XnnOperator.MAXIMUM, x, 0.0))


def _softplus_refusal(call: Call) -> str | None:
    if not call.args["beta"] > 0 or not call.args["threshold"] >= _LINEAR:
        return f"its beta is not positive, or its threshold is below {_LINEAR}"
    return None


def _sqrt(e: Emission, x: Tracked, call: Call) -> Tracked:
    if call.node.meta["val"].dtype is torch.float16:
        # XNNPACK returns NaN for infinity, which 256 squared is in float16.
        x = e.unary(XnnOperator.CLAMP, x, (-math.inf, 1e30))
    return e.unary(XnnOperator.SQUARE_ROOT, x)


def _rsqrt(e: Emission, x: Tracked, call: Call) -> Tracked:
    # XNNPACK's node returns NaN for 0. Models rely on infinity there and replace it (graph nodes
    # without neighbours); norms add an epsilon, and keep the single node.
    if _is_above_zero(call.node.args[0]):
        return e.unary(XnnOperator.RECIPROCAL_SQUARE_ROOT, x)
    return e.binary(XnnOperator.DIV, e.plain(e.scalar(1.0)), _sqrt(e, x, call))


def _is_above_zero(node: object) -> bool:
    """Return whether a node adds a positive number to squares, absolute values or their sum."""
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
        and is_square(source, _aten.abs.default)
    )


def is_square(node: Node, *others: object) -> bool:
    """Return whether a node is a square, or calls one of ``others``."""
    if node.target is _aten.pow.Tensor_Scalar:
        return bool(node.args[1] == 2)
    if node.target is _aten.mul.Tensor:
        return node.args[0] is node.args[1]
    return node.target in (_aten.square.default, *others)


_LINEAR = 17
"""Input from which softplus(x) equals x in float32."""
_UNIT = int8(1 / 256, -128)
"""Quantised encoding of numbers from 0 to 1."""
_ADDITIONS = frozenset({_aten.add.Tensor, _aten.add.Scalar})
_MEANS = frozenset({_aten.mean.dim, _aten.mean.default, _aten.sum.dim_IntList, _aten.sum.default})
_POWERS: dict[float, Build] = {
    1.0: lambda e, x, _: e.unary(XnnOperator.COPY, x),
    2.0: lambda e, x, _: e.unary(XnnOperator.SQUARE, x),
    3.0: lambda e, x, _: e.binary(_mul, e.unary(XnnOperator.SQUARE, x), x),
    0.5: _sqrt,
    -0.5: _rsqrt,
}


def _pow_refusal(call: Call) -> str | None:
    exponent = call.args["exponent"]
    if not isinstance(exponent, (int, float)) or float(exponent) not in _POWERS:
        return f"the exponent must be one of {', '.join(map(str, sorted(_POWERS)))}"
    return None


def _prelu(e: Emission, x: Tracked, call: Call) -> Tracked:
    slope, rank = e.of(call.args["weight"]), len(x.shape)
    layout = Layout.CHANNELS_LAST if rank == 4 else x.preferred
    if slope.is_constant:
        data = e.constant(call.args["weight"])
        encoding = _slope_encoding(e, x, data)
        if data.numel() == 1 or rank < 2:
            data = data.reshape(1)
        else:
            wide = data.reshape(1, -1, *(1,) * (rank - 2))
            data = wide.permute(layout.permutation(rank))
        slope_id = e.constant_value(data, encoding=encoding)
    else:
        slope_id = e.id_of(slope)
    value = e.add(
        XnnOperator.PRELU, x.shape, layout, input1_id=e.id_of(x, layout), input2_id=slope_id
    )
    return e.tracked(x.shape, value, layout)


def _slope_encoding(
    emission: Emission, tracked: Tracked, slope: torch.Tensor
) -> XnnEncoding | None:
    """Return the encoding of slopes for an integer input; None for a float input."""
    if not emission.writes.is_int8:
        return None
    source, largest = tracked.encoding, float(slope.abs().max())
    magnitude = (source.zero_point + 128) * source.scale
    # A single slope is exact as the largest 8-bit integer; several are off by up to half a step.
    if slope.numel() > 1 and magnitude * largest / 254 >= emission.writes.scale:
        raise FloatNeededError("its slopes, rounded to 8 bits, would change its result by a step")
    return int8(largest / 127 if largest else 1.0)


def _leaky_scale_refusal(call: Call, scales: Scales) -> str | None:
    ratio = scales.inputs[0].scale / scales.result.scale
    if ratio * max(1.0, abs(float(call.args["negative_slope"]))) > MOST_RESCALED:
        return f"its input is more than {MOST_RESCALED} times coarser than its result"
    return None


def _gelu_int8_refusal(call: Call) -> str | None:
    return None if call.args["approximate"] == "none" else "XNNPACK's gelu is the exact one"


def _pow_int8_refusal(call: Call) -> str | None:
    return None if call.args["exponent"] in (2, 0.5) else "it takes several nodes"


_SLOPE = constants("weight", subject="slope")
ELEMENTWISE: Table = table(
    {
        **{name: _direct(kind) for name, kind in _DIRECT.items()},
        # In float16 the runtime's node returns NaN for -0.0 and infinity, and -0.0 for negative
        # numbers.
        "sqrt": _on_integers(_sqrt, wide=True),
        "elu celu selu": _on_integers(_elu, _elu_refusal, int8_refusal=_elu_int8_refusal),
        "softplus": function(_softplus, _softplus_refusal, wide=True),
        "mish": function(_mish, wide=True),
        "gelu": _on_integers(_gelu, int8_refusal=_gelu_int8_refusal, wide=True),
        "hardsigmoid": function(_hardsigmoid),
        "leaky_relu": _on_integers(_leaky_relu, scale_refusal=_leaky_scale_refusal),
        "pow.Tensor_Scalar": _on_integers(
            lambda e, x, call: _POWERS[float(call.args["exponent"])](e, x, call),
            _pow_refusal,
            int8_refusal=_pow_int8_refusal,
            wide=True,
        ),
        "prelu _prelu_kernel": _on_integers(_prelu, _SLOPE, packs=("weight",)),
        "reciprocal": function(lambda e, x, _: e.binary(XnnOperator.DIV, 1.0, x)),
        "rsqrt": function(_rsqrt, wide=True),
        "silu": _on_integers(_silu, scale_refusal=_silu_scale_refusal),
    }
)


def _limits_refusal(call: Call) -> str | None:
    limits = clamp_range(call.node)
    if limits is None or any(math.isnan(limit) for limit in limits):
        return "its limits are not plain numbers"
    return None


_CLAMP = function(
    lambda e, x, call: e.unary(XnnOperator.CLAMP, x, clamp_range(call.node)),
    _limits_refusal,
    integers=Integers.KEEPS,
)
CLAMPS: Table = dict.fromkeys([*LIMITS, *LIMIT_NAMES], _CLAMP)
