"""The table of all supported operators."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

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
from lowerdeck.xnnpack.operators.masks import FILLS, NO_SELECT
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
    **FILLS,
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
_LEFT: dict[object, str] = dict.fromkeys(named("where.Scalar masked_fill.Tensor"), NO_SELECT)
_LEFT[_aten._int_mm.default] = (
    "XNNPACK multiplies integers only in layers that round whole rows and have constant weights"
)
"""Operators that are deliberately not delegated, with the reason."""
SUPPORTED = tuple(sorted([*(str(op) for op in OPERATORS), *QUANTIZATION]))
"""Names of the supported operators, for listings of backends."""


def entry_of(node: Node) -> Operator | None:
    """Return the description of a node's operator, or None if XNNPACK does not support it."""
    entry = OPERATORS.get(node.target)
    if entry is None and node.op == "call_function":
        entry = QUANTIZATION.get(str(node.target))
    return entry


def refusal(
    node: Node, constants: Collection[str], known: Mapping[Node, str | None] = MappingProxyType({})
) -> str | None:
    """Return why XNNPACK does not support a node, or None.

    Args:
        node: Any node of a program, in training or in core ATen form.
        constants: Names of constant placeholders, and of the calls folded from them.
        known: Results for earlier nodes.
    """
    if node.op != "call_function":
        return "it is not a call"
    if node.target is operator.getitem:
        producer = node.args[0]
        if isinstance(producer, Node):
            choice = str(producer.target) in QUANTIZATION
            reason = known[producer] if producer in known else refusal(producer, constants)
            return reason or (None if choice else _tensor_refusal(node))
        return "it does not read the result of a call"
    if node.name in constants:
        return None
    if getattr(node.target, "namespace", "") == "higher_order":
        return "it contains subgraphs, which run on other kernels"
    if not isinstance(node.target, OpOverload):
        return "it is not a torch operator"
    entry = OPERATORS.get(node.target)
    if entry is None:
        entry = QUANTIZATION.get(str(node.target))
        if entry is None:
            return _LEFT.get(node.target, "XNNPACK has no such operator")
        return _quantization_refusal(node, entry, constants)
    tensors = [
        tensor
        for tensor in node.all_input_nodes
        if isinstance(tensor.meta.get("val"), torch.Tensor)
    ]
    if not tensors:
        return "it has no tensor input"
    call = Call(node, arguments_of(node), constants)
    bools = [call.args.get(name) for name in entry.bools]
    for tensor in tensors:
        # Constants are stored in the float dtype to which eager would convert them.
        dtypes = (*_FLOATS, torch.bool) if tensor in bools else _FLOATS
        reason = None if tensor.name in constants else _tensor_refusal(tensor, dtypes)
        if reason:
            return f"input {tensor.name}: {reason}"
    return _tensor_refusal(node) or entry.refusal(call)


def _quantization_refusal(node: Node, entry: Operator, constants: Collection[str]) -> str | None:
    """Return why a quantise or dequantise node is refused, or None."""
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
    # Check only the first of several results: the others have its dtype and rank, or must be
    # unused.
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
