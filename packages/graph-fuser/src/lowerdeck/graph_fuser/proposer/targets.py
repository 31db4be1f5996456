"""The name of what a node calls."""

from __future__ import annotations

import torch
from torch.fx import Node

from lowerdeck.torch_base import OpOverload, OpOverloadPacket


def qualified_name(node: Node) -> str:
    """Return what ``node`` calls as torch's partitioner names it, such as ``"_operator.getitem"``.

    Args:
        node: Any node; for a method or a module the name is its target.
    """
    target = node.target
    if isinstance(target, str):
        return target
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        return f"torch.ops.{target}"
    name = getattr(target, "__name__", type(target).__name__)
    module = str(getattr(target, "__module__", None) or "torch")
    if getattr(torch, name, None) is target:
        module = "torch"
    elif getattr(torch.nn.functional, name, None) is target:
        module = "torch.nn.functional"
    return f"{module}.{name}"
