"""All operators that the backend takes."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence

import torch
from torch.fx import Node

from lowerdeck.serializer import XnnGraph
from lowerdeck.torch_base import OpOverload, arguments_of
from lowerdeck.xnnpack.emit import Call, named
from lowerdeck.xnnpack.operators.arithmetic import ARITHMETIC
from lowerdeck.xnnpack.operators.attention import ATTENTION
from lowerdeck.xnnpack.operators.batch_norm import BATCH_NORMS
from lowerdeck.xnnpack.operators.choosing import CHOOSING
from lowerdeck.xnnpack.operators.composed import COMPOSED
from lowerdeck.xnnpack.operators.contract import Operator, Table
from lowerdeck.xnnpack.operators.convolution import CONVOLUTIONS
from lowerdeck.xnnpack.operators.elementwise import CLAMPS, ELEMENTWISE
from lowerdeck.xnnpack.operators.linear import LINEAR
from lowerdeck.xnnpack.operators.normalization import NORMALIZATION
from lowerdeck.xnnpack.operators.padding import PADDING
from lowerdeck.xnnpack.operators.pieces import PIECES
from lowerdeck.xnnpack.operators.pooling import POOLING
from lowerdeck.xnnpack.operators.quantization import QUANTIZATION, is_constant_source
from lowerdeck.xnnpack.operators.rearranging import REARRANGING
from lowerdeck.xnnpack.operators.recurrent import RECURRENT
from lowerdeck.xnnpack.operators.reductions import REDUCTIONS
from lowerdeck.xnnpack.operators.shapes import SHAPES

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
OPERATORS: Table = {
    **ARITHMETIC,
    **ATTENTION,
    **BATCH_NORMS,
    **CHOOSING,
    **CLAMPS,
    **COMPOSED,
    **CONVOLUTIONS,
    **ELEMENTWISE,
    **LINEAR,
    **NORMALIZATION,
    **PADDING,
    **PIECES,
    **POOLING,
    **REARRANGING,
    **RECURRENT,
    **REDUCTIONS,
    **SHAPES,
}
_aten = torch.ops.aten
_LEFT: dict[object, str] = dict.fromkeys(
    named(
        "where.self where.ScalarOther where.ScalarSelf where.Scalar "
        "masked_fill.Scalar masked_fill.Tensor"
    ),
    "XNNPACK cannot choose, and products with truths are NaN where what is left is infinite",
)
_LEFT[_aten._int_mm.default] = (
    "XNNPACK multiplies integers in layers alone that round whole rows and have constant weights"
)
"""Operators that are left on purpose, and why."""
SUPPORTED = tuple(sorted([*(str(op) for op in OPERATORS), *QUANTIZATION]))
"""Their names, for those who list backends."""


def entry_of(node: Node) -> Operator | None:
    """Return how a node's operator is emitted, None if XNNPACK does not take it."""
    entry = OPERATORS.get(node.target)
    if entry is None and node.op == "call_function":
        entry = QUANTIZATION.get(str(node.target))
    return entry


def refusal(node: Node, constants: Collection[str]) -> str | None:
    """Return why XNNPACK cannot take a node, or None where it can.

    Args:
        node: Any node of a program, in training or in core ATen form.
        constants: Names of the placeholders that no run changes, and of the calls that are
            computed of them ahead of time.

    Returns:
        The reason, for a report to the user.
    """
    if node.op != "call_function":
        return "it is no call"
    if node.target is operator.getitem:
        producer = node.args[0]
        if isinstance(producer, Node):
            choice = str(producer.target) in QUANTIZATION
            return refusal(producer, constants) or (None if choice else _tensor_refusal(node))
        return "it reads no call"
    if node.name in constants:
        return None
    if getattr(node.target, "namespace", "") == "higher_order":
        return "it holds graphs of its own, which stay with other kernels"
    if not isinstance(node.target, OpOverload):
        return "it is no operator of torch"
    entry = entry_of(node)
    if entry is None:
        return _LEFT.get(node.target, "XNNPACK has no such operator")
    if str(node.target) in QUANTIZATION:
        return _quantization_refusal(node, entry, constants)
    tensors = [
        tensor
        for tensor in node.all_input_nodes
        if isinstance(tensor.meta.get("val"), torch.Tensor)
    ]
    if not tensors:
        return "it reads no tensor"
    truths = [arguments_of(node).get(name) for name in entry.truths]
    for tensor in tensors:
        # What is known ahead of time is stored as the floats that eager would make of it.
        dtypes = (*_FLOATS, torch.bool) if tensor in truths else _FLOATS
        reason = None if tensor.name in constants else _tensor_refusal(tensor, dtypes)
        if reason:
            return f"input {tensor.name}: {reason}"
    return _tensor_refusal(node) or entry.refusal(Call(node, arguments_of(node), constants))


def _quantization_refusal(node: Node, entry: Operator, constants: Collection[str]) -> str | None:
    """Return why a node that quantises or dequantises is not taken; its tensors are integers."""
    args = arguments_of(node)
    source = args.get("input")
    if isinstance(source, Node) and not is_constant_source(source, constants):
        value = source.meta.get("val")
        if isinstance(value, torch.Tensor) and value.dtype.is_floating_point:
            reason = _tensor_refusal(source)
            if reason:
                return f"input {source.name}: {reason}"
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and value.dim() > XnnGraph.MAX_RANK:
        return f"{value.dim()} dimensions where at most {XnnGraph.MAX_RANK} are allowed"
    return entry.refusal(Call(node, args, constants))


def _tensor_refusal(node: Node, dtypes: Sequence[torch.dtype] = _FLOATS) -> str | None:
    value = node.meta.get("val")
    # Of several results the first stands for all: the others are like it or must be unused.
    tensor = value[0] if isinstance(value, (list, tuple)) and value else value
    if not isinstance(tensor, torch.Tensor):
        return "it is not a tensor"
    if tensor.dtype not in dtypes:
        return f"{tensor.dtype} where float32, float16 or bfloat16 is needed"
    if tensor.dim() > XnnGraph.MAX_RANK:
        return f"{tensor.dim()} dimensions where at most {XnnGraph.MAX_RANK} are allowed"
    if any(isinstance(size, int) and size == 0 for size in tensor.shape):
        return "it is empty"
    return None
