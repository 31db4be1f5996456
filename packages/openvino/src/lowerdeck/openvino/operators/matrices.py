"""Products of matrices, and attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from openvino import opset13
from torch.fx import Node

from lowerdeck.lowered_module import PartitionView, SupportedOp, arguments_of, visits
from lowerdeck.openvino.operators.dtypes import FLOATS
from lowerdeck.openvino.translation import Translation, tensor_of

_ATTENTION = "aten.scaled_dot_product_attention"


def _attention(node: Node) -> bool | str:
    found = arguments_of(node)
    if found["dropout_p"]:
        return "it drops at random"
    if found["enable_gqa"]:
        return "heads share keys"
    return tensor_of(found["query"]).dim() == 4 or "it is not of batches of heads"


class Matrices(Translation):
    """Products of matrices, layers and attention."""

    matrices: ClassVar[Sequence[SupportedOp]] = (
        *(
            SupportedOp(name, FLOATS)
            for name in ("aten.linear", "aten.matmul", "aten.mm", "aten.bmm", "aten.mv")
        ),
        SupportedOp("aten.addmm", FLOATS),
        SupportedOp("aten.baddbmm", FLOATS),
        SupportedOp(_ATTENTION, FLOATS | {torch.bool}, when=_attention),
    )

    @visits("aten.matmul", "aten.mm", "aten.bmm", "aten.mv")
    def product(self, part: PartitionView, node: Node) -> None:
        """Visit a product, with torch's rules for vectors and batches."""
        left, right = (self.read(one) for one in node.args)
        self.give(part, node, opset13.matmul(left, right, False, False))

    @visits("aten.linear")
    def linear(self, part: PartitionView, node: Node) -> None:
        """Visit a layer."""
        found = arguments_of(node)
        made = opset13.matmul(self.read(found["input"]), self.read(found["weight"]), False, True)
        if found["bias"] is not None:
            made = opset13.add(made, self.read(found["bias"]))
        self.give(part, node, made)

    @visits("aten.addmm", "aten.baddbmm")
    def added_product(self, part: PartitionView, node: Node) -> None:
        """Visit a product with something added, both perhaps scaled."""
        found = arguments_of(node)
        dtype = tensor_of(node).dtype
        names = ("mat1", "mat2") if "mat1" in found else ("batch1", "batch2")
        made = opset13.matmul(*(self.read(found[name]) for name in names), False, False)
        if found["alpha"] != 1:
            made = opset13.multiply(made, self.read(found["alpha"], dtype))
        if found["beta"] == 0:  # whatever is there is not looked at, not even where it is NaN
            self.give(part, node, made)
            return
        added = self.read(found["self"])
        if found["beta"] != 1:
            added = opset13.multiply(added, self.read(found["beta"], dtype)).output(0)
        self.give(part, node, opset13.add(made, added))

    @visits(_ATTENTION)
    def attention(self, part: PartitionView, node: Node) -> None:
        """Visit attention, with a mask of truths, of floats, or none."""
        found = arguments_of(node)
        dtype = tensor_of(node).dtype
        scale = found["scale"]
        if scale is None:
            scale = float(tensor_of(found["query"]).shape[-1]) ** -0.5
        operands = [self.read(found[name]) for name in ("query", "key", "value")]
        mask = found["attn_mask"]
        made = opset13.scaled_dot_product_attention(
            *operands,
            # Without a mask a scale must follow a mask of nothing.
            self.read(0.0, dtype) if mask is None else self.read(mask),
            self.read(scale, dtype),
            bool(found["is_causal"]),
        )
        self.give(part, node, made)
