"""Quantize and dequantize operators."""

from __future__ import annotations

from typing import Any

import torch
from openvino import Output, Type, opset13
from torch.fx import Node

from lowerdeck.lowered_module import PartitionView, arguments_of, operator_name, visits
from lowerdeck.openvino.layout import ints
from lowerdeck.openvino.translation import TYPES, Translation, tensor_of

_QUANTIZE = "quantized_decomposed.quantize_per_tensor.default"
_QUANTIZE_CHANNELS = "quantized_decomposed.quantize_per_channel.default"
_DEQUANTIZE = "quantized_decomposed.dequantize_per_tensor.default"
_DEQUANTIZE_CHANNELS = "quantized_decomposed.dequantize_per_channel.default"
_INTEGERS = {torch.int8, torch.uint8}
_ALLOWED = frozenset({torch.float32, torch.float64, torch.int64, torch.int32} | _INTEGERS)


def _is_8_bit(node: Node) -> bool | str:
    arguments = arguments_of(node)
    integers = (
        tensor_of(node)
        if "dtype" in arguments and ".quantize" in operator_name(node)
        else tensor_of(arguments["input"])
    )
    if integers.dtype not in _INTEGERS:
        return f"it is quantised to {integers.dtype}"
    numbers = [
        name for name in ("scale", "zero_point", "scales", "zero_points") if name in arguments
    ]
    computed = [name for name in numbers if isinstance(arguments[name], Node) and name[-1] != "s"]
    return not computed or f"its {computed[0]} is computed at run time"


class Quantized(Translation):
    """Quantization and dequantization."""

    @visits(_QUANTIZE, _QUANTIZE_CHANNELS, dtypes=_ALLOWED, when=_is_8_bit)
    def quantize(self, part: PartitionView, node: Node) -> None:
        """Visit ``quantize_per_tensor`` or ``quantize_per_channel``."""
        arguments = arguments_of(node)
        scale, zero = self._parameters_of(arguments)
        value = opset13.round(opset13.divide(self.read(arguments["input"]), scale), "half_to_even")
        if zero is not None:
            value = opset13.add(value, zero)
        lowest, highest = float(arguments["quant_min"]), float(arguments["quant_max"])
        bounded = opset13.clamp(value, lowest, highest)
        self.give(part, node, opset13.convert(bounded, TYPES[tensor_of(node).dtype]))

    @visits(_DEQUANTIZE, _DEQUANTIZE_CHANNELS, dtypes=_ALLOWED, when=_is_8_bit)
    def dequantize(self, part: PartitionView, node: Node) -> None:
        """Visit a dequantization.

        After a quantize with equal parameters, the pair becomes one ``FakeQuantize``, from which
        OpenVINO derives integer kernels.
        """
        arguments = arguments_of(node)
        source = arguments["input"]
        if operator_name(node) == _DEQUANTIZE and operator_name(source) == _QUANTIZE:
            before = arguments_of(source)
            same = all(
                before[name] == arguments[name]
                for name in ("scale", "zero_point", "quant_min", "quant_max", "dtype")
            )
            if same:
                self.give(part, node, self._rounded(before))
                return
        scale, zero = self._parameters_of(arguments)
        value: Any = opset13.convert(self.read(source), Type.f32)
        if zero is not None:
            value = opset13.subtract(value, zero)
        self.give(part, node, opset13.multiply(value, scale))

    def _rounded(self, arguments: dict[str, Any]) -> Any:
        scale, zero = float(arguments["scale"]), int(arguments["zero_point"])
        lowest, highest = int(arguments["quant_min"]), int(arguments["quant_max"])
        low, high = self.read((lowest - zero) * scale), self.read((highest - zero) * scale)
        levels = highest - lowest + 1
        return opset13.fake_quantize(self.read(arguments["input"]), low, high, low, high, levels)

    def _parameters_of(self, arguments: dict[str, Any]) -> tuple[Output, Output | None]:
        if "scale" in arguments:
            zero = int(arguments["zero_point"])
            return self.read(float(arguments["scale"])), self.read(float(zero)) if zero else None
        rank = tensor_of(arguments["input"]).dim()
        sizes = [1] * rank
        sizes[arguments["axis"] % rank] = -1
        return (
            self._along(arguments["scales"], sizes),
            None
            if arguments["zero_points"] is None
            else self._along(arguments["zero_points"], sizes),
        )

    def _along(self, node: Node, sizes: list[int]) -> Output:
        value = opset13.convert(self.read(node), Type.f32)
        return opset13.reshape(value, ints(sizes), special_zero=False).output(0)
