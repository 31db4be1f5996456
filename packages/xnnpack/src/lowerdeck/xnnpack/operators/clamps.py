"""Clamps that are nodes by themselves."""

from __future__ import annotations

import math

from lowerdeck.serializer import XnnOperator
from lowerdeck.xnnpack.emit import Call
from lowerdeck.xnnpack.operators.contract import Integers, Table, function
from lowerdeck.xnnpack.operators.results import LIMIT_NAMES, LIMITS, clamp_range


def _refusal(call: Call) -> str | None:
    limits = clamp_range(call.node)
    if limits is None or any(math.isnan(limit) for limit in limits):
        return "its limits are not plain numbers"
    return None


_CLAMP = function(
    lambda e, x, call: e.unary(XnnOperator.CLAMP, x, clamp_range(call.node)),
    _refusal,
    integers=Integers.KEEPS,
)
CLAMPS: Table = dict.fromkeys([*LIMITS, *LIMIT_NAMES], _CLAMP)
