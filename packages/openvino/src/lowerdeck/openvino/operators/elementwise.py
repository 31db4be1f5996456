"""Elementwise operators."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import openvino
import torch
from openvino import Output, opset13
from torch.fx import Node

from lowerdeck.lowered_module import PartitionView, arguments_of, operator_name, visits
from lowerdeck.openvino.operators.dtypes import FLOATS, NUMBERS, VALUES
from lowerdeck.openvino.translation import Translation, tensor_of

_UNARY: dict[str, Callable[[Output], openvino.Node]] = {
    "aten.abs": opset13.abs,
    "aten.acos": opset13.acos,
    "aten.acosh": opset13.acosh,
    "aten.asin": opset13.asin,
    "aten.asinh": opset13.asinh,
    "aten.atan": opset13.atan,
    "aten.atanh": opset13.atanh,
    "aten.ceil": opset13.ceiling,
    "aten.cos": opset13.cos,
    "aten.cosh": opset13.cosh,
    "aten.erf": opset13.erf,
    "aten.exp": opset13.exp,
    "aten.floor": opset13.floor,
    "aten.hardsigmoid": opset13.hsigmoid,
    "aten.hardswish": opset13.hswish,
    "aten.log": opset13.log,
    "aten.mish": opset13.mish,
    "aten.neg": opset13.negative,
    "aten.relu": opset13.relu,
    "aten.relu6": lambda value: opset13.clamp(value, 0.0, 6.0),
    "aten.round": opset13.round,
    "aten.sigmoid": opset13.sigmoid,
    "aten.sign": opset13.sign,
    "aten.silu": lambda value: opset13.multiply(value, opset13.sigmoid(value)),
    "aten.sin": opset13.sin,
    "aten.sinh": opset13.sinh,
    "aten.sqrt": opset13.sqrt,
    "aten.square": lambda value: opset13.multiply(value, value),
    "aten.tan": opset13.tan,
    "aten.tanh": opset13.tanh,
}
_ARITHMETIC: dict[str, Callable[[Output, Output], openvino.Node]] = {
    "aten.add": opset13.add,
    "aten.sub": opset13.subtract,
    "aten.mul": opset13.multiply,
    "aten.div": opset13.divide,
    "aten.maximum": opset13.maximum,
    "aten.minimum": opset13.minimum,
}
_COMPARISONS: dict[str, Callable[[Output, Output], openvino.Node]] = {
    "aten.eq": opset13.equal,
    "aten.ne": opset13.not_equal,
    "aten.lt": opset13.less,
    "aten.le": opset13.less_equal,
    # Operands swapped: OpenVINO evaluates ``NaN > x`` as true and ``NaN < x`` as false.
    "aten.gt": lambda left, right: opset13.less(right, left),
    "aten.ge": lambda left, right: opset13.less_equal(right, left),
}
_LOGIC: dict[str, Callable[[Output, Output], openvino.Node]] = {
    "aten.logical_and": opset13.logical_and,
    "aten.logical_or": opset13.logical_or,
    "aten.logical_xor": opset13.logical_xor,
}


def _forms(names: Iterable[str], *overloads: str) -> list[str]:
    """Return the full names of operators and of their in-place variants."""
    forms = []
    for name in names:
        short = name.partition(".")[2]
        for form in (short, f"{short}_"):
            packet = getattr(torch.ops.aten, form, None)
            for overload in overloads:
                if packet is not None and overload in packet.overloads():
                    forms.append(f"aten.{form}.{overload}")
    return forms


_UNARY_FORMS = _forms(_UNARY, "default")
_SUM_FORMS = [
    *_forms(("aten.add", "aten.sub", "aten.mul"), "Tensor", "Scalar"),
    *_forms(("aten.maximum", "aten.minimum"), "default"),
]
_QUOTIENT_FORMS = _forms(("aten.div",), "Tensor", "Scalar")
_COMPARISON_FORMS = [f"{name}.{form}" for name in _COMPARISONS for form in ("Tensor", "Scalar")]
_CLAMPS = _forms(("aten.clamp", "aten.hardtanh", "aten.clamp_min", "aten.clamp_max"), "default")
_CHOICES = tuple(f"aten.where.{form}" for form in ("self", "ScalarSelf", "ScalarOther"))
_LEAKY = _forms(("aten.leaky_relu",), "default")
_ELU = _forms(("aten.elu",), "default")
_SELU = _forms(("aten.selu",), "default")
_GELU = _forms(("aten.gelu",), "default")
_RECIPROCALS = _forms(("aten.reciprocal", "aten.rsqrt"), "default")


def _same_dtype(node: Node) -> bool | str:
    arguments = arguments_of(node)
    same = all(
        tensor_of(operand).dtype == tensor_of(node).dtype
        for operand in (arguments["self"], arguments["other"])
        if isinstance(operand, Node)
    )
    return same or "its operands have another dtype than its result"


def _compared(node: Node) -> bool | str:
    """Reject int32 comparisons that may be inexact in float32, which OpenVINO uses for them."""
    arguments = arguments_of(node)
    sides = arguments["self"], arguments["other"]
    dtypes = {tensor_of(side).dtype for side in sides if isinstance(side, Node)}
    if torch.int32 not in dtypes or dtypes & FLOATS:
        return True
    if len(dtypes) == 1 and all(isinstance(side, Node) or abs(side) >= 2**24 for side in sides):
        return "OpenVINO compares int32 in float32, which rounds beyond 2**24"
    return True


def _chosen(node: Node) -> bool | str:
    """Reject int32, which OpenVINO computes in float32 if fused with a comparison."""
    is_int32 = tensor_of(node).dtype == torch.int32
    return not is_int32 or "OpenVINO selects int32 in float32, which rounds beyond 2**24"


def _exponential_linear(node: Node) -> bool | str:
    arguments = arguments_of(node)
    plain = arguments["scale"] == 1 and arguments["input_scale"] == 1
    return plain or "its scale or input_scale is not 1"


def _softplus(node: Node) -> bool | str:
    arguments = arguments_of(node)
    return (
        arguments["beta"] == 1 and arguments["threshold"] >= 20
    ) or "its beta is not 1, or its threshold is below 20"


def _plain(name: str) -> str:
    """Return an operator's functional name without overload."""
    return ".".join(name.split(".")[:2]).removesuffix("_")


class Elementwise(Translation):
    """Arithmetic, activations, comparisons and selections."""

    @visits(*_UNARY_FORMS, dtypes=FLOATS)
    def unary(self, part: PartitionView, node: Node) -> None:
        """Visit a unary function."""
        function = _UNARY[_plain(operator_name(node))]
        self.give(part, node, function(self.read(node.args[0])))

    @visits(*_SUM_FORMS, dtypes=NUMBERS, when=_same_dtype)
    @visits(*_QUOTIENT_FORMS, dtypes=FLOATS)
    def arithmetic(self, part: PartitionView, node: Node) -> None:
        """Visit a binary function, with a scaled second operand if ``alpha`` is given."""
        arguments = arguments_of(node)
        dtype = tensor_of(node).dtype
        left, right = self.read(arguments["self"], dtype), self.read(arguments["other"], dtype)
        if arguments.get("alpha", 1) != 1:
            right = opset13.multiply(right, self.read(arguments["alpha"], dtype)).output(0)
        self.give(part, node, _ARITHMETIC[_plain(operator_name(node))](left, right))

    @visits("aten.rsub.Scalar", dtypes=FLOATS)
    def reversed_difference(self, part: PartitionView, node: Node) -> None:
        """Visit ``rsub``."""
        arguments = arguments_of(node)
        dtype = tensor_of(node).dtype
        subtrahend = self.read(arguments["self"])
        if arguments["alpha"] != 1:
            subtrahend = opset13.multiply(subtrahend, self.read(arguments["alpha"], dtype)).output(
                0
            )
        self.give(part, node, opset13.subtract(self.read(arguments["other"], dtype), subtrahend))

    @visits("aten.pow.Tensor_Scalar", "aten.pow.Tensor_Tensor", dtypes=FLOATS)
    def power(self, part: PartitionView, node: Node) -> None:
        """Visit a power."""
        arguments = arguments_of(node)
        dtype = tensor_of(node).dtype
        base, exponent = (
            self.read(arguments["self"], dtype),
            self.read(arguments["exponent"], dtype),
        )
        self.give(part, node, opset13.power(base, exponent))

    @visits(*_COMPARISON_FORMS, dtypes=VALUES, when=_compared)
    def comparison(self, part: PartitionView, node: Node) -> None:
        """Visit a comparison in torch's promoted dtype, or float32 for int16 and int32."""
        arguments = arguments_of(node)
        left, right = arguments["self"], arguments["other"]
        dtype = torch.result_type(
            *(tensor_of(x) if isinstance(x, Node) else x for x in (left, right))
        )
        if dtype in (torch.int16, torch.int32):
            # int8 and uint8 are promoted to int16, which OpenVINO lacks; it compares integers in
            # float32 anyway.
            dtype = torch.float32
        compare = _COMPARISONS[_plain(operator_name(node))]
        self.give(part, node, compare(self.read(left, dtype), self.read(right, dtype)))

    @visits(*_LOGIC, dtypes={torch.bool})
    def logic(self, part: PartitionView, node: Node) -> None:
        """Visit a binary function of bools."""
        function = _LOGIC[_plain(operator_name(node))]
        self.give(part, node, function(self.read(node.args[0]), self.read(node.args[1])))

    @visits("aten.logical_not", dtypes={torch.bool})
    def negation(self, part: PartitionView, node: Node) -> None:
        """Visit ``logical_not``."""
        self.give(part, node, opset13.logical_not(self.read(node.args[0])))

    @visits(*_CLAMPS, dtypes=FLOATS)
    def clamp(self, part: PartitionView, node: Node) -> None:
        """Visit ``clamp`` with one or two bounds."""
        arguments = arguments_of(node)
        lower, upper = (
            arguments.get("min", arguments.get("min_val")),
            arguments.get("max", arguments.get("max_val")),
        )
        value, dtype = self.read(arguments["self"]), tensor_of(node).dtype
        # Two operators, because torch returns the upper bound if the lower one is above it.
        if lower is not None:
            value = opset13.maximum(value, self.read(lower, dtype)).output(0)
        if upper is not None:
            value = opset13.minimum(value, self.read(upper, dtype)).output(0)
        self.give(part, node, value)

    @visits(*_LEAKY, dtypes=FLOATS)
    def leaky(self, part: PartitionView, node: Node) -> None:
        """Visit ``leaky_relu``."""
        arguments = arguments_of(node)
        slope = self.read(arguments["negative_slope"], tensor_of(node).dtype)
        self.give(part, node, opset13.prelu(self.read(arguments["self"]), slope))

    @visits("aten.prelu", dtypes=FLOATS)
    def learned_slopes(self, part: PartitionView, node: Node) -> None:
        """Visit ``prelu``."""
        arguments = arguments_of(node)
        self.give(
            part, node, opset13.prelu(self.read(arguments["self"]), self.read(arguments["weight"]))
        )

    @visits(*_ELU, dtypes=FLOATS, when=_exponential_linear)
    def exponential_linear(self, part: PartitionView, node: Node) -> None:
        """Visit ``elu``."""
        arguments = arguments_of(node)
        self.give(part, node, opset13.elu(self.read(arguments["self"]), float(arguments["alpha"])))

    @visits(*_SELU, dtypes=FLOATS)
    def self_normalising(self, part: PartitionView, node: Node) -> None:
        """Visit ``selu``, with torch's constants."""
        dtype = tensor_of(node).dtype
        alpha = self.read(1.6732632423543772848170429916717, dtype)
        scale = self.read(1.0507009873554804934193349852946, dtype)
        self.give(part, node, opset13.selu(self.read(node.args[0]), alpha, scale))

    @visits(*_GELU, dtypes=FLOATS)
    def gelu(self, part: PartitionView, node: Node) -> None:
        """Visit ``gelu``, exact or with tanh."""
        arguments = arguments_of(node)
        form = "tanh" if arguments["approximate"] == "tanh" else "erf"
        self.give(part, node, opset13.gelu(self.read(arguments["self"]), form))

    @visits("aten.softplus", dtypes=FLOATS, when=_softplus)
    def softplus(self, part: PartitionView, node: Node) -> None:
        """Visit ``softplus``."""
        self.give(part, node, opset13.softplus(self.read(node.args[0])))

    @visits("aten.log_sigmoid", dtypes=FLOATS)
    def log_sigmoid(self, part: PartitionView, node: Node) -> None:
        """Visit ``log_sigmoid``, in a form that does not overflow."""
        opposite = opset13.negative(self.read(node.args[0]))
        self.give(part, node, opset13.negative(opset13.softplus(opposite)))

    @visits(*_RECIPROCALS, dtypes=FLOATS)
    def reciprocal(self, part: PartitionView, node: Node) -> None:
        """Visit ``reciprocal`` or ``rsqrt``."""
        value = self.read(node.args[0])
        if _plain(operator_name(node)) == "aten.rsqrt":
            value = opset13.sqrt(value).output(0)
        self.give(part, node, opset13.divide(self.read(1.0, tensor_of(node).dtype), value))

    @visits("aten.addcmul", dtypes=FLOATS)
    def added_product(self, part: PartitionView, node: Node) -> None:
        """Visit ``addcmul``."""
        arguments = arguments_of(node)
        dtype = tensor_of(node).dtype
        product = opset13.multiply(
            self.read(arguments["tensor1"]), self.read(arguments["tensor2"])
        )
        if arguments["value"] != 1:
            product = opset13.multiply(product, self.read(arguments["value"], dtype))
        self.give(part, node, opset13.add(self.read(arguments["self"]), product))

    @visits(*_CHOICES, dtypes=VALUES, when=_chosen)
    def choice(self, part: PartitionView, node: Node) -> None:
        """Visit ``where``."""
        arguments = arguments_of(node)
        dtype = tensor_of(node).dtype
        chosen = self.read(arguments["self"], dtype), self.read(arguments["other"], dtype)
        self.give(part, node, opset13.select(self.read(arguments["condition"]), *chosen))

    @visits("aten.masked_fill.Scalar", dtypes=VALUES, when=_chosen)
    def masked(self, part: PartitionView, node: Node) -> None:
        """Visit ``masked_fill``."""
        arguments = arguments_of(node)
        filling = self.read(arguments["value"], tensor_of(node).dtype)
        original = self.read(arguments["self"])
        self.give(part, node, opset13.select(self.read(arguments["mask"]), filling, original))
