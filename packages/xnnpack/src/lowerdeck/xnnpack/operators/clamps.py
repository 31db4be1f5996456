"""Clamping: by itself, or for nothing as the range of the node before it."""

from __future__ import annotations

import math

import torch
from torch.fx import Node

from lowerdeck.serializer import XnnOperator
from lowerdeck.torch_base import arguments_of
from lowerdeck.xnnpack.emit import Call, Emission, Range, fake
from lowerdeck.xnnpack.operators.contract import Integers, Operator, Table

_aten = torch.ops.aten
_LIMITS: dict[object, Range] = {
    _aten.relu.default: (0.0, math.inf),
    _aten.relu6.default: (0.0, 6.0),
}
_LIMIT_NAMES: dict[object, tuple[str, str]] = {
    _aten.hardtanh.default: ("min_val", "max_val"),
    _aten.clamp.default: ("min", "max"),
    _aten.clamp_min.default: ("min", ""),
    _aten.clamp_max.default: ("", "max"),
}


def clamp_range(node: Node) -> Range | None:
    """Return the least and greatest result of a clamp, or None for any other node."""
    if node.op != "call_function":
        return None
    if node.target in _LIMITS:
        return _LIMITS[node.target]
    names = _LIMIT_NAMES.get(node.target)
    if names is None:
        return None
    args = arguments_of(node)
    low, high = (args.get(name) for name in names)
    if any(isinstance(limit, Node) for limit in (low, high)):
        return None
    return (-math.inf if low is None else float(low), math.inf if high is None else float(high))


def following_clamp(node: Node) -> tuple[Node, Range | None]:
    """Return the clamp that is a node's only user, with its range.

    Args:
        node: A node whose kind in XNNPACK can clamp its output.

    Returns:
        The clamp and its range; ``node`` itself and None where none follows.
    """
    if len(node.users) == 1:
        user = next(iter(node.users))
        limits = clamp_range(user)
        # min > max is legal in torch and refused by XNNPACK as a range, though not as a clamp.
        if limits is not None and limits[0] <= limits[1] and fake(user) is not None:
            return user, limits
    return node, None


def _emit(emission: Emission, call: Call) -> None:
    tracked = emission.of(call.args["self"])
    emission.define(call.node, emission.unary(XnnOperator.CLAMP, tracked, clamp_range(call.node)))


def _refusal(call: Call) -> str | None:
    limits = clamp_range(call.node)
    if limits is None or any(math.isnan(limit) for limit in limits):
        return "its limits are not plain numbers"
    return None


CLAMPS: Table = dict.fromkeys(
    [*_LIMITS, *_LIMIT_NAMES], Operator(_emit, _refusal, integers=Integers.KEEPS)
)
