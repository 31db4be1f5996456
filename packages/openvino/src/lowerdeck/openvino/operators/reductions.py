"""Reductions, softmax, variance and running sums."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import openvino
import torch
from openvino import Output, opset13
from torch.fx import Node

from lowerdeck.lowered_module import PartitionView, arguments_of, operator_name, visits
from lowerdeck.openvino.layout import ints
from lowerdeck.openvino.operators.dtypes import FLOATS, NUMBERS
from lowerdeck.openvino.translation import Translation, axes_of, axis_of, tensor_of

_REDUCTIONS: dict[str, Callable[[Output, Output, bool], openvino.Node]] = {
    "aten.amax.default": opset13.reduce_max,
    "aten.amin.default": opset13.reduce_min,
    "aten.mean.dim": opset13.reduce_mean,
    "aten.sum.dim_IntList": opset13.reduce_sum,
    "aten.prod.dim_int": opset13.reduce_prod,
}
_LOGICAL: dict[str, Callable[[Output, Output, bool], openvino.Node]] = {
    "aten.any.dim": opset13.reduce_logical_or,
    "aten.all.dim": opset13.reduce_logical_and,
}
_SOFTMAX = {
    "aten.softmax.int": opset13.softmax,
    "aten._softmax.default": opset13.softmax,
    "aten.log_softmax.int": opset13.log_softmax,
    "aten._log_softmax.default": opset13.log_softmax,
}
_VARIANCES = ("aten.var.correction", "aten.var.dim", "aten.std.correction", "aten.std.dim")


def _norm(node: Node) -> bool | str:
    return arguments_of(node)["ord"] in (1, 2) or "its order is neither 1 nor 2"


def _has_elements(node: Node) -> bool | str:
    return 0 not in tensor_of(node.all_input_nodes[0]).shape or "its input is empty"


def _variance_divisor(node: Node) -> float:
    """Return the divisor of a variance."""
    arguments = arguments_of(node)
    correction = arguments.get("correction", 1 if arguments.get("unbiased", True) else 0)
    sizes = tensor_of(arguments["self"]).shape
    count = prod(int(sizes[axis]) for axis in axes_of(arguments["self"], arguments["dim"]))
    return count - (1 if correction is None else correction)


def _has_positive_divisor(node: Node) -> bool | str:
    """Reject a variance that divides by zero, for which OpenVINO may return zero."""
    answer = _has_elements(node)
    sizes = tensor_of(node.all_input_nodes[0]).shape
    if answer is True and all(isinstance(size, int) for size in sizes):
        return (
            _variance_divisor(node) > 0
            or "it has no more elements than its correction: torch divides by zero"
        )
    return answer


class Reductions(Translation):
    """Reductions."""

    @visits(*_REDUCTIONS, dtypes=FLOATS, when=_has_elements)
    @visits(*_LOGICAL, dtypes={torch.bool}, when=_has_elements)
    def reduction(self, part: PartitionView, node: Node) -> None:
        """Visit a sum, mean, product, maximum, minimum, ``any`` or ``all``."""
        arguments = arguments_of(node)
        reduce = {**_REDUCTIONS, **_LOGICAL}[operator_name(node)]
        axes = ints(axes_of(arguments["self"], arguments.get("dim")))
        value = self.read(arguments["self"], tensor_of(node).dtype)
        self.give(part, node, reduce(value, axes, bool(arguments.get("keepdim"))))

    @visits(*_SOFTMAX, dtypes=FLOATS)
    def softmax(self, part: PartitionView, node: Node) -> None:
        """Visit ``softmax`` or ``log_softmax``."""
        arguments = arguments_of(node)
        value = self.read(arguments["self"], tensor_of(node).dtype)
        function = _SOFTMAX[operator_name(node)]
        self.give(part, node, function(value, axis_of(arguments["self"], arguments["dim"])))

    @visits(*_VARIANCES, dtypes=FLOATS, static=True, when=_has_positive_divisor)
    def variance(self, part: PartitionView, node: Node) -> None:
        """Visit a variance or a standard deviation."""
        arguments = arguments_of(node)
        axes = axes_of(arguments["self"], arguments["dim"])
        value, dtype = self.read(arguments["self"]), tensor_of(node).dtype
        mean = opset13.reduce_mean(value, ints(axes), True)
        squares = opset13.squared_difference(value, mean)
        total = opset13.reduce_sum(squares, ints(axes), bool(arguments["keepdim"]))
        quotient = opset13.divide(total, self.read(_variance_divisor(node), dtype))
        if operator_name(node).startswith("aten.std"):
            quotient = opset13.sqrt(quotient)
        self.give(part, node, quotient)

    @visits("aten.linalg_vector_norm", dtypes=FLOATS, when=_norm)
    def vector_norm(self, part: PartitionView, node: Node) -> None:
        """Visit a vector norm."""
        arguments = arguments_of(node)
        reduce = opset13.reduce_l1 if arguments["ord"] == 1 else opset13.reduce_l2
        axes = ints(axes_of(arguments["self"], arguments["dim"]))
        value = self.read(arguments["self"], tensor_of(node).dtype)
        self.give(part, node, reduce(value, axes, bool(arguments["keepdim"])))

    @visits("aten.cumsum", dtypes=NUMBERS)
    def running_sum(self, part: PartitionView, node: Node) -> None:
        """Visit ``cumsum``."""
        arguments = arguments_of(node)
        value = self.read(arguments["self"], tensor_of(node).dtype)
        self.give(part, node, opset13.cumsum(value, ints(axis_of(node, arguments["dim"]))))
