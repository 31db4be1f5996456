"""Binary arithmetic of tensors, with broadcasting, and of tensors and scalars."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch.fx import Node

from lowerdeck.serializer import XnnOperator
from lowerdeck.xnnpack.emit import Call, Emission, Tracked, is_fixed
from lowerdeck.xnnpack.operators.contract import Integers, Operator, Scales, Table, function, table

_COARSEST = 2**11
"""Scale ratio above which the runtime's results may be off by one step."""
_FINEST_PRODUCT = 2**15
"""Scale ratio above which a product, in steps of the result, overflows int32."""
_FINEST_SUM = 2**14
"""Largest scale ratio of sums; from 2**20 on the runtime returns garbage."""
_APART = 2**20
"""Ratio of the input scales above which the finer input loses steps."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CAN_CLAMP = {XnnOperator.ADD, XnnOperator.SUBTRACT, XnnOperator.MULTIPLY, XnnOperator.DIV}


def _binary(kind: XnnOperator, *, swapped: bool = False) -> Operator:
    def build(e: Emission, left: Tracked, call: Call) -> Tracked:
        right = e.of(call.args["other"])
        if swapped:
            left, right = right, left
        right = scaled(e, right, call.args.get("alpha", 1))
        left, right = _without_repeats(left, right), _without_repeats(right, left)
        return e.binary(kind, left, right, call.limits, shape=call.result)

    return function(
        build,
        _refusal,
        integers=Integers.CHOOSES,
        scale_refusal=partial(scale_refusal, kind),
        clamps=kind in _CAN_CLAMP,
    )


def scale_refusal(kind: XnnOperator, call: Call, scales: Scales) -> str | None:
    """Return why XNNPACK computes a call wrongly on integers with these scales, or None."""
    if call.args.get("alpha", 1) != 1:
        return "it has an alpha"
    steps = [encoding.scale for encoding in scales.inputs]
    if kind is XnnOperator.MULTIPLY:
        if math.prod(steps) > _FINEST_PRODUCT * scales.result.scale:
            return f"its result is more than {_FINEST_PRODUCT} times finer than its product"
    elif kind in (XnnOperator.ADD, XnnOperator.SUBTRACT):
        if max(steps) > _FINEST_SUM * scales.result.scale:
            return f"its result is more than {_FINEST_SUM} times finer than an input"
        if max(steps) > _APART * min(steps):
            return f"its inputs' scales are more than {_APART} times apart"
    if scales.result.scale > _COARSEST * min(encoding.scale for encoding in scales.inputs):
        return f"its result is more than {_COARSEST} times coarser than an input"
    return None


def _without_repeats(tracked: Tracked, other: Tracked) -> Tracked:
    """Reduce repeated dimensions of a constant to size 1 where broadcasting restores them.

    Folded constants often repeat one row, such as the token types of a sequence.
    """
    data = tracked.data
    if not isinstance(data, torch.Tensor) or other.is_constant:
        return tracked
    for dim in range(-min(len(tracked.shape), len(other.shape)), 0):
        size = other.shape[dim]
        if not is_fixed(size) or size == 1 or data.shape[dim] != size:
            continue
        first = data.narrow(dim, 0, 1)
        bits = _BITS[data.element_size()]
        # Compared by bits: dividing by -0.0 differs from dividing by 0.0.
        if bool((data.view(bits) == first.view(bits)).all()):
            data = first
    return tracked if data is tracked.data else Tracked.of(data)


def scaled(emission: Emission, tracked: Tracked, factor: float) -> Tracked:
    """Return a tensor times a number; constants are folded."""
    if factor == 1:
        return tracked
    tensor = tracked.tensor
    if tensor is not None:
        return Tracked(tracked.shape, tensor * factor)
    return emission.binary(XnnOperator.MULTIPLY, tracked, float(factor))


def _refusal(call: Call) -> str | None:
    for name in ("self", "other"):
        operand = call.args[name]
        if not isinstance(operand, (Node, int, float)):
            return f"{name} is neither a tensor nor a plain number"
        if isinstance(operand, Node) and not isinstance(operand.meta.get("val"), torch.Tensor):
            return f"{name} is not a constant number"
    if not isinstance(call.args.get("alpha", 1), (int, float)):
        return "alpha is not a plain number"
    return None


ARITHMETIC: Table = table(
    {
        "add.Tensor add.Scalar": _binary(XnnOperator.ADD),
        "sub.Tensor sub.Scalar": _binary(XnnOperator.SUBTRACT),
        "rsub.Tensor rsub.Scalar": _binary(XnnOperator.SUBTRACT, swapped=True),
        "mul.Tensor mul.Scalar": _binary(XnnOperator.MULTIPLY),
        "div.Tensor div.Scalar": _binary(XnnOperator.DIV),
        "maximum": _binary(XnnOperator.MAXIMUM),
        "minimum": _binary(XnnOperator.MINIMUM),
    }
)
