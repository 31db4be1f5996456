"""Products of matrices, and attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from openvino import Output, opset13
from torch.fx import Node

from lowerdeck.lowered_module import PartitionView, SupportedOp, arguments_of, visits
from lowerdeck.openvino.layout import whole
from lowerdeck.openvino.operators.dtypes import FLOATS
from lowerdeck.openvino.translation import TYPES, Translation, tensor_of

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
        """Visit attention, with a mask of truths, of floats, or none.

        OpenVINO's own operator for it takes the processor's precision, whatever it is told.
        """
        found = arguments_of(node)
        dtype = tensor_of(node).dtype
        scale = found["scale"]
        if scale is None:
            scale = float(tensor_of(found["query"]).shape[-1]) ** -0.5
        query, key, value = (self.read(found[name]) for name in ("query", "key", "value"))
        scores = opset13.multiply(query, self.read(scale, dtype))
        scores = opset13.matmul(scores, key, False, True)
        # Half of what is least: the sum of it and a score is still finite.
        least = self.read(torch.finfo(dtype).min / 2, dtype)
        bias = self._bias(found, least)
        if bias is not None:
            scores = opset13.add(scores, bias)
        made = opset13.matmul(opset13.softmax(scores, -1), value, False, False)
        if found["attn_mask"] is not None:
            # Rows of which a mask leaves nothing are 0, as in torch.
            most = opset13.reduce_max(bias, whole([-1]), keep_dims=True)
            seen = opset13.convert(opset13.greater(most, least), TYPES[dtype])
            made = opset13.multiply(made, seen)
        self.give(part, node, made)

    def _bias(self, found: Mapping[str, Any], least: Output) -> Output | None:
        """Return what is added to scores: 0 where they count, and finite numbers."""
        zero = opset13.convert_like(whole(0), least)
        mask = found["attn_mask"]
        if mask is not None:
            if tensor_of(mask).dtype == torch.bool:
                return opset13.select(self.read(mask), zero, least).output(0)
            return opset13.maximum(self.read(mask), least).output(0)
        if not found["is_causal"]:
            return None
        rows, columns = (
            opset13.range(
                whole(0),
                opset13.gather(opset13.shape_of(self.read(found[name])), whole(-2), whole(0)),
                whole(1),
                "i64",
            )
            for name in ("query", "key")
        )
        counts = opset13.less_equal(columns, opset13.unsqueeze(rows, whole(1)))
        return opset13.select(counts, zero, least).output(0)
