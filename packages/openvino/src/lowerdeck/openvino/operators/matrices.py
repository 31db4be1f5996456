"""Matrix products and attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from openvino import Output, Type, opset13
from torch.fx import Node

from lowerdeck.lowered_module import PartitionView, arguments_of, visits
from lowerdeck.openvino.layout import ints
from lowerdeck.openvino.operators.dtypes import FLOATS
from lowerdeck.openvino.translation import TYPES, Translation, tensor_of

_ATTENTION = "aten.scaled_dot_product_attention"
# Mask values below this are assumed to absorb all scores.
_BEYOND = -1e30
# OpenVINO clamps constants to the range of bfloat16, but not computed values.
_LEAST = torch.finfo(torch.bfloat16).min


def _attention(node: Node) -> bool | str:
    arguments = arguments_of(node)
    if arguments["dropout_p"]:
        return "its dropout is active"
    if arguments["enable_gqa"]:
        return "query heads share keys (enable_gqa)"
    return tensor_of(arguments["query"]).dim() == 4 or "its tensors are not of rank 4"


class Matrices(Translation):
    """Matrix products, linear layers and attention."""

    @visits("aten.matmul", "aten.mm", "aten.bmm", "aten.mv", dtypes=FLOATS)
    def product(self, part: PartitionView, node: Node) -> None:
        """Visit a matrix product, with torch's broadcasting."""
        left, right = (self.read(operand) for operand in node.args)
        self.give(part, node, opset13.matmul(left, right, False, False))

    @visits("aten.linear", dtypes=FLOATS)
    def linear(self, part: PartitionView, node: Node) -> None:
        """Visit ``linear``."""
        arguments = arguments_of(node)
        product = opset13.matmul(
            self.read(arguments["input"]), self.read(arguments["weight"]), False, True
        )
        if arguments["bias"] is not None:
            product = opset13.add(product, self.read(arguments["bias"]))
        self.give(part, node, product)

    @visits("aten.addmm", "aten.baddbmm", dtypes=FLOATS)
    def added_product(self, part: PartitionView, node: Node) -> None:
        """Visit ``addmm`` or ``baddbmm``, with ``beta`` and ``alpha``."""
        arguments = arguments_of(node)
        dtype = tensor_of(node).dtype
        names = ("mat1", "mat2") if "mat1" in arguments else ("batch1", "batch2")
        product = opset13.matmul(*(self.read(arguments[name]) for name in names), False, False)
        if arguments["alpha"] != 1:
            product = opset13.multiply(product, self.read(arguments["alpha"], dtype))
        if arguments["beta"] == 0:  # torch ignores the addend if beta is 0, even where it is NaN
            self.give(part, node, product)
            return
        added = self.read(arguments["self"])
        if arguments["beta"] != 1:
            added = opset13.multiply(added, self.read(arguments["beta"], dtype)).output(0)
        self.give(part, node, opset13.add(product, added))

    @visits(_ATTENTION, dtypes=FLOATS | {torch.bool}, when=_attention)
    def attention(self, part: PartitionView, node: Node) -> None:
        """Visit scaled dot product attention, with a boolean mask, a float mask, or none.

        OpenVINO's attention operator ignores the requested precision.
        """
        arguments = arguments_of(node)
        dtype = tensor_of(node).dtype
        scale = arguments["scale"]
        if scale is None:
            scale = float(tensor_of(arguments["query"]).shape[-1]) ** -0.5
        # In float32, as in torch: float16 rounds scores near its most negative number.
        query, key, value = (
            self.read(arguments[x], torch.float32) for x in ("query", "key", "value")
        )
        scores = opset13.multiply(query, self.read(scale))
        scores = opset13.matmul(scores, key, False, True)
        bias, visible_rows = self._bias(arguments)
        if bias is not None:
            scores = opset13.add(scores, bias)
        attended = opset13.matmul(opset13.softmax(scores, -1), value, False, False)
        if visible_rows is not None:
            attended = opset13.multiply(attended, opset13.convert(visible_rows, Type.f32))
        self.give(
            part,
            node,
            attended if dtype == torch.float32 else opset13.convert(attended, TYPES[dtype]),
        )

    def _bias(self, arguments: Mapping[str, Any]) -> tuple[Output | None, Output | None]:
        """Return the mask as a finite bias, and the rows that are not fully masked.

        In torch, a fully masked row is 0 for -inf, but for the smallest finite number it is the
        mean of the values. A softmax without infinities cannot distinguish the two cases, so the
        rows are returned too.
        """
        zero, masked = self.read(0.0), self.read(torch.finfo(torch.float32).min * 0.75)
        mask = arguments["attn_mask"]
        if mask is not None:
            if tensor_of(mask).dtype == torch.bool:
                visible = self.read(mask)
                bias = opset13.select(visible, zero, masked)
            else:
                value = self.read(mask, torch.float32)
                visible = opset13.not_equal(value, self.read(float("-inf"))).output(0)
                # Halve the distance beyond this bound, which preserves the order.
                bound = self.read(_BEYOND)
                excess = opset13.clamp(value, _LEAST, _BEYOND)
                excess = opset13.multiply(excess, self.read(0.5))
                far = opset13.add(excess, self.read(_BEYOND / 2))
                bias = opset13.select(opset13.less(value, bound), far, value)
                bias = opset13.select(visible, bias, masked)
            visible_rows = opset13.reduce_logical_or(visible, ints([-1]), keep_dims=True)
            return bias.output(0), visible_rows.output(0)
        if not arguments["is_causal"]:
            return None, None
        rows, columns = (
            opset13.range(
                ints(0),
                opset13.gather(opset13.shape_of(self.read(arguments[name])), ints(-2), ints(0)),
                ints(1),
                "i64",
            )
            for name in ("query", "key")
        )
        visible = opset13.less_equal(columns, opset13.unsqueeze(rows, ints(1)))
        return opset13.select(visible, zero, masked).output(0), None
