"""All operators that the backend takes."""

from __future__ import annotations

import operator
from collections.abc import Collection

import torch
from torch.fx import Node

from lowerdeck.torch_base import OpOverload, arguments_of, schema_of
from lowerdeck.xnnpack.emit.arguments import Call
from lowerdeck.xnnpack.operators.arithmetic import ARITHMETIC
from lowerdeck.xnnpack.operators.attention import ATTENTION
from lowerdeck.xnnpack.operators.batch_norm import BATCH_NORMS
from lowerdeck.xnnpack.operators.clamps import CLAMPS
from lowerdeck.xnnpack.operators.contract import Operator, Table
from lowerdeck.xnnpack.operators.convolution import CONVOLUTIONS
from lowerdeck.xnnpack.operators.elementwise import ELEMENTWISE
from lowerdeck.xnnpack.operators.linear import LINEAR
from lowerdeck.xnnpack.operators.normalization import NORMALIZATION
from lowerdeck.xnnpack.operators.pieces import PIECES
from lowerdeck.xnnpack.operators.pooling import POOLING
from lowerdeck.xnnpack.operators.reductions import REDUCTIONS
from lowerdeck.xnnpack.operators.shapes import SHAPES
from lowerdeck.xnnpack.payload.schema import MAX_RANK

OPERATORS: Table = {
    **ARITHMETIC,
    **ATTENTION,
    **BATCH_NORMS,
    **CLAMPS,
    **CONVOLUTIONS,
    **ELEMENTWISE,
    **LINEAR,
    **NORMALIZATION,
    **PIECES,
    **POOLING,
    **REDUCTIONS,
    **SHAPES,
}
SUPPORTED = tuple(sorted(str(op) for op in OPERATORS))
"""Their names, for those who list backends."""


def refusal(node: Node, constants: Collection[str]) -> str | None:
    """Return why XNNPACK cannot take a node, or None where it can.

    Args:
        node: Any node of a program, in training or in core ATen form.
        constants: Names of the placeholders that no run changes.

    Returns:
        The reason, for a report to the user.
    """
    if node.op != "call_function":
        return "it is no call"
    if node.target is operator.getitem:
        producer = node.args[0]
        if isinstance(producer, Node):
            return refusal(producer, constants) or _tensor_refusal(node)
        return "it reads no call"
    if getattr(node.target, "namespace", "") == "higher_order":
        return "it holds graphs of its own, which stay with other kernels"
    if not isinstance(node.target, OpOverload):
        return "it is no operator of torch"
    entry: Operator | None = OPERATORS.get(node.target)
    if entry is None:
        return "XNNPACK has no such operator"
    tensors = [
        one for one in node.all_input_nodes if isinstance(one.meta.get("val"), torch.Tensor)
    ]
    if not tensors:
        return "it reads no tensor"
    for one in tensors:
        reason = _tensor_refusal(one)
        if reason:
            return f"input {one.name}: {reason}"
    return (
        _tensor_refusal(node)
        or _mutation_refusal(node)
        or entry.refusal(Call(node, arguments_of(node), constants))
    )


def _tensor_refusal(node: Node) -> str | None:
    value = node.meta.get("val")
    # Of several results the first stands for all: the others are like it or must be unused.
    tensor = value[0] if isinstance(value, (list, tuple)) and value else value
    if not isinstance(tensor, torch.Tensor):
        return "it is not a tensor"
    if tensor.dtype != torch.float32:
        return f"{tensor.dtype} where float32 is needed"
    if tensor.dim() > MAX_RANK:
        return f"{tensor.dim()} dimensions where at most {MAX_RANK} are allowed"
    if any(isinstance(size, int) and size == 0 for size in tensor.shape):
        return "it is empty"
    return None


def _mutation_refusal(node: Node) -> str | None:
    """A write in place is a plain result where nobody else can see what it overwrites."""
    if not isinstance(node.target, OpOverload) or not schema_of(node.target).is_mutable:
        return None
    source = node.args[0]
    if (
        not isinstance(source, Node)
        or not isinstance(source.target, OpOverload)
        or _returns_alias(source.target)
        or source.target is torch.ops.aten.dropout.default
    ):
        return "it writes into what may belong to others"
    if len(source.users) > 1:
        return "it overwrites what others read"
    return None


def _returns_alias(op: OpOverload) -> bool:
    """Return whether a result can share memory with an argument that is only read."""
    returned = schema_of(op).returns
    return any(one.alias_info is not None and not one.alias_info.is_write for one in returned)
