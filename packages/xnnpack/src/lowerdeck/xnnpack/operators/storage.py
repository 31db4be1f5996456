"""Choose the encodings of a node's operands and result: float32, float16 or int8."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.fx import Node

from lowerdeck.serializer import XnnEncoding
from lowerdeck.torch_base import arguments_of
from lowerdeck.xnnpack.emit import Call, fake
from lowerdeck.xnnpack.operators.contract import Integers, Operator, Scales
from lowerdeck.xnnpack.operators.quantization import QUANTIZE, name_of, static_encoding
from lowerdeck.xnnpack.operators.results import clamp_range, first_result, following_clamp
from lowerdeck.xnnpack.operators.shapes import SHAPES
from lowerdeck.xnnpack.payload import FLOAT, HALF


class Storage(NamedTuple):
    """Encodings of one node.

    Attributes:
        reads: Encoding of its operands; None if each keeps the encoding of its producer.
        writes: Encoding of its result.
        in_float: Why a node that reads 8-bit integers computes in float, or None.
    """

    reads: XnnEncoding | None
    writes: XnnEncoding
    in_float: str | None = None


EncodingOf = Callable[[Node], XnnEncoding | None]
"""Returns the encoding of a node's result; None for a constant, which may have any."""


def storage_of(call: Call, entry: Operator, encoding_of: EncodingOf, *, halves: bool) -> Storage:
    """Return the encodings of a node.

    Args:
        encoding_of: Encodings of the results of earlier nodes.
        halves: Whether float16 is computed in float16.
    """
    base = HALF if halves and not entry.wide and _is_half(call.node) else FLOAT
    tensors = [
        node for node in call.node.all_input_nodes if _is_operand(call, entry, node, encoding_of)
    ]
    inputs = [encoding_of(node) for node in tensors]
    encodings = [encoding for encoding in inputs if encoding is not None]
    if not any(encoding.is_int8 for encoding in encodings):
        return Storage(base, base)
    reason = _input_refusal(entry, tensors, inputs)
    if reason is None:
        return _integers(call, entry, encodings, base)
    return Storage(base, base, reason)


def _is_operand(call: Call, entry: Operator, node: Node, encoding_of: EncodingOf) -> bool:
    """Return whether an argument must have the encoding of the call's operands."""
    if fake(node) is None or any(node is call.args.get(name) for name in entry.bools):
        return False
    if not any(node is call.args.get(name) for name in entry.packs):
        return True
    # A computed tensor may also be the second operand of a product.
    encoding = encoding_of(node)
    return encoding is not None and encoding.is_int8 and not call.is_weight(node)


def _is_half(node: Node) -> bool:
    value = node.meta.get("val")
    tensor = value[0] if isinstance(value, (list, tuple)) and value else value
    return isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float16


def _input_refusal(
    entry: Operator, tensors: Sequence[Node], inputs: Sequence[XnnEncoding | None]
) -> str | None:
    if entry.integers is Integers.NEVER:
        return "XNNPACK computes it on floats only"
    for node, encoding in zip(tensors, inputs, strict=True):
        if encoding is not None and not encoding.is_int8:
            return f"its input {node.name} is not quantised"
        if encoding is None and not _has_free_encoding(entry, node):
            return f"its constant input {node.name} is not quantised"
    return None


def _has_free_encoding(entry: Operator, node: Node) -> bool:
    """Return whether a constant is a scalar, or is stored in the encoding of the result."""
    value = fake(node)
    return entry.integers is Integers.JOINS or (value is not None and value.numel() == 1)


def _integers(
    call: Call, entry: Operator, inputs: Sequence[XnnEncoding], base: XnnEncoding
) -> Storage:
    last, limits = first_result(call.node), None
    if entry.clamps:
        last, limits = following_clamp(last)
    after = rounded_after(last)
    own = clamp_range(call.node)
    if own is not None and after is not None:
        return Storage(None, after)
    if entry.integers is Integers.CHOOSES and after is None:
        return Storage(base, base, "its result is not quantised")
    source = inputs[0]
    reads: XnnEncoding | None
    if entry.integers is Integers.KEEPS:
        if not {limits, own} <= {None, (0.0, math.inf)} and after != source:
            return Storage(
                base, base, "its clamp limits are not representable at its input's scale"
            )
        result, reads = source, source
    elif entry.integers is Integers.JOINS:
        if after is None and len(set(inputs)) > 1:
            return Storage(base, base, "its inputs' scales differ and its result is not quantised")
        result = reads = after or source
    else:
        assert after is not None
        result, reads = after, None
    reason = entry.int8_refusal(call) or entry.scale_refusal(call, Scales(tuple(inputs), result))
    return Storage(base, base, reason) if reason else Storage(reads, result)


def rounded_after(node: Node) -> XnnEncoding | None:
    """Return the encoding to which all users quantise a result, or None.

    Operators that only move data are skipped, such as the view after a decomposed linear layer.
    """
    encodings = {
        static_encoding(user)
        if name_of(user) == QUANTIZE
        else rounded_after(user)
        if _moves(user)
        else None
        for user in node.users
    }
    return encodings.pop() if len(encodings) == 1 else None


def _moves(node: Node) -> bool:
    entry, result, source = SHAPES.get(node.target), fake(node), node.args[:1]
    if entry is None or result is None or not source or not isinstance(source[0], Node):
        return False
    before = fake(source[0])
    return (
        before is not None
        and before.dtype == result.dtype
        and not entry.int8_refusal(Call(node, arguments_of(node), ()))
    )
