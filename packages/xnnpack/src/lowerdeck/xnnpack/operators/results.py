"""Result nodes of a call: the getitem of the first result, and a following clamp."""

from __future__ import annotations

import math
import operator

import torch
from torch.fx import Node

from lowerdeck.torch_base import arguments_of
from lowerdeck.xnnpack.emit import Call, Range, fake

_aten = torch.ops.aten
LIMITS: dict[object, Range] = {
    _aten.relu.default: (0.0, math.inf),
    _aten.relu6.default: (0.0, 6.0),
}
"""Clamps of fixed limits."""
LIMIT_NAMES: dict[object, tuple[str, str]] = {
    _aten.hardtanh.default: ("min_val", "max_val"),
    _aten.clamp.default: ("min", "max"),
    _aten.clamp_min.default: ("min", ""),
    _aten.clamp_max.default: ("", "max"),
}
"""Clamps whose limits are arguments."""


def first_result(node: Node) -> Node:
    """Return the node of a call's first result: its getitem, or the call."""
    if isinstance(node.meta["val"], torch.Tensor):
        return node
    return next((user for user in node.users if user.args[1:] == (0,)), node)


def first_result_refusal(call: Call) -> str | None:
    """Refuse calls whose other results are used."""
    if isinstance(call.node.meta["val"], torch.Tensor):
        return None
    readers = list(call.node.users)
    if any(reader.target is not operator.getitem for reader in readers):
        return "its results are used as a list"
    if any(reader.args[1] != 0 and reader.users for reader in readers):
        return "more than its first result is used"
    if sum(reader.args[1] == 0 for reader in readers) != 1:
        return "its first result is read several times or not at all"
    return None


def clamp_range(node: Node) -> Range | None:
    """Return the minimum and maximum of a clamp, or None for other nodes."""
    if node.op != "call_function":
        return None
    if node.target in LIMITS:
        return LIMITS[node.target]
    names = LIMIT_NAMES.get(node.target)
    if names is None:
        return None
    args = arguments_of(node)
    low, high = (args.get(name) for name in names)
    if any(isinstance(limit, Node) for limit in (low, high)):
        return None
    return (-math.inf if low is None else float(low), math.inf if high is None else float(high))


def following_clamp(node: Node) -> tuple[Node, Range | None]:
    """Return the clamp that is a node's only user with its range, else the node and None.

    Args:
        node: A node whose XNNPACK kind supports an output range.
    """
    if len(node.users) == 1:
        user = next(iter(node.users))
        limits = clamp_range(user)
        # XNNPACK refuses min > max, legal in torch, as an output range, but not in a clamp node.
        if limits is not None and limits[0] <= limits[1] and fake(user) is not None:
            return user, limits
    return node, None
