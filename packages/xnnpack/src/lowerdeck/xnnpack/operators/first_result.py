"""Operators that return more than anybody needs: statistics, or indices of maxima."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from lowerdeck.xnnpack.emit import Call


def first_result(node: Node) -> Node:
    """Return the node that holds the first result of a call: the call, or what reads it."""
    if isinstance(node.meta["val"], torch.Tensor):
        return node
    return next(user for user in node.users if user.args[1] == 0)


def first_result_refusal(call: Call) -> str | None:
    """Return why a call is refused of which more than the first result is read, or None."""
    if isinstance(call.node.meta["val"], torch.Tensor):
        return None
    readers = list(call.node.users)
    if any(reader.target is not operator.getitem for reader in readers):
        return "its results are used as a list"
    if any(reader.args[1] != 0 and reader.users for reader in readers):
        return "more than its first result is used"
    if sum(reader.args[1] == 0 for reader in readers) != 1:
        return "its first result is not read once"
    return None
