"""Base class of all visitors, which builds the OpenVINO model."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from typing import Any, ClassVar

import openvino
import torch
from openvino import Output, Type, opset13
from torch.fx import Node

from lowerdeck.lowered_module import DeclarativeBackend, PartitionView
from lowerdeck.openvino.compile_error import CompileError
from lowerdeck.openvino.device import PRECISION, device_of, payload_of
from lowerdeck.openvino.layout import CHANNELS_LAST, with_channels_first, with_channels_last
from lowerdeck.openvino.precision import rounded_to_float16
from lowerdeck.torch_base import bytes_of, is_channels_last, view_tensor

TYPES: dict[torch.dtype, Type] = {
    torch.float32: Type.f32,
    torch.float16: Type.f16,
    torch.int64: Type.i64,
    torch.int32: Type.i32,
    torch.int8: Type.i8,
    torch.uint8: Type.u8,
    torch.bool: Type.boolean,
}

_NO_OPERATORS = ("Parameter", "Constant", "Result")


class Translation(DeclarativeBackend):
    """Build an OpenVINO model from a partition; subclasses add families of operators."""

    # Each release compiles differently, and OpenVINO reads only payloads of the same version.
    version: ClassVar[str] = (
        f"{metadata.version('lowerdeck-openvino')} of openvino {openvino.__version__}"
    )
    # The program keeps buffers and receives their new values as results: payloads have no state.
    owns_state: ClassVar[bool] = False

    def begin_partition(self, part: PartitionView) -> None:
        """Create the model's parameters and constants."""
        self._keeps_float32 = part.compile_specs.get(PRECISION) != b"device"
        self._values: dict[Node, Output] = {}
        self._known: set[Output] = set()
        self._parameters = [self._parameter(node) for node in part.inputs]
        for node, tensor in part.constants.items():
            # Zero-copy view; OpenVINO copies at compilation. ``tensor.numpy()`` would materialize
            # lazy clones.
            array = view_tensor(bytes_of(tensor), tensor.dtype, tensor.shape).numpy()
            self._values[node] = opset13.constant(array, TYPES[tensor.dtype]).output(0)
            self._known.add(self._values[node])

    def _parameter(self, node: Node) -> openvino.Node:
        tensor = tensor_of(node)
        sizes = [size if isinstance(size, int) else -1 for size in tensor.shape]
        parameter = opset13.parameter(sizes, TYPES[tensor.dtype], name=node.name)
        value = parameter.output(0)
        self._values[node] = with_channels_first(value) if is_channels_last(tensor) else value
        self._known.add(self._values[node])
        return parameter

    def read(self, argument: Any, dtype: torch.dtype | None = None) -> Output:
        """Return the value of an argument.

        Args:
            argument: A node or a number.
            dtype: Dtype of the result; by default the node's, or float32 for numbers.
        """
        if not isinstance(argument, Node):
            return opset13.constant(argument, TYPES[dtype or torch.float32]).output(0)
        value = self._values[argument]
        if dtype is None or tensor_of(argument).dtype == dtype:
            return value
        if dtype == torch.bool:
            # Not by a conversion, which maps the most negative int32 to false.
            exact = self.read(argument, torch.float32)
            return opset13.not_equal(exact, self.read(0.0)).output(0)
        if dtype == torch.float16 and self._keeps_float32:
            value = rounded_to_float16(self.read(argument, torch.float32))
        return opset13.convert(value, TYPES[dtype]).output(0)

    def give(self, part: PartitionView, node: Node, output: openvino.Node | Output) -> None:
        """Record the value of a node under its name.

        Args:
            node: The visited node, or a ``getitem`` of it.
            output: An OpenVINO operator, or one of its outputs.
        """
        value = output.output(0) if isinstance(output, openvino.Node) else output
        # Keep existing names.
        if value not in self._known and value.get_index() == 0:
            value.get_node().set_friendly_name(node.name)
            part.emit(value, nodes=[node], identifier=node.name)
        self._values[node] = value
        self._known.add(value)

    def compile(self, part: PartitionView) -> bytes:
        """Compile the model to a payload.

        Args:
            part: The partition, after its nodes were visited.

        Raises:
            CompileError: OpenVINO cannot compile the model.
            DeviceError: The device is not available.
        """
        device = device_of(part.compile_specs)
        results = [self._result(node) for node in (*part.mutations.values(), *part.outputs)]
        try:
            model = openvino.Model(results, self._parameters, "partition")
            return payload_of(model, device, keep_precision=self._keeps_float32)
        except RuntimeError as error:
            raise CompileError(f"OpenVINO cannot compile this partition: {error}") from error

    def _result(self, node: Node) -> Output:
        value = self._values[node]
        if value.get_node().get_type_name() in _NO_OPERATORS:
            # The runtime does not write results that are inputs; OpenVINO keeps the no-op
            # ``maximum(x, x)``.
            join = (
                opset13.logical_or if value.get_element_type() == Type.boolean else opset13.maximum
            )
            value = join(value, value).output(0)
        if not is_channels_last(tensor_of(node)):
            return value
        value = with_channels_last(value)
        # The name records the dim order for the runtime.
        value.get_tensor().set_names({f"{node.name} {CHANNELS_LAST}"})
        return value


def tensor_of(node: Node) -> torch.Tensor:
    """Return the fake tensor of a node."""
    tensor: torch.Tensor = node.meta["val"]
    return tensor


def axis_of(node: Node, dim: int) -> int:
    """Return a dimension of a node's tensor as a non-negative number."""
    return dim % max(tensor_of(node).dim(), 1)


def axes_of(node: Node, dims: int | Sequence[int] | None) -> list[int]:
    """Return dimensions as non-negative numbers; all for None or an empty list."""
    if isinstance(dims, int):
        return [axis_of(node, dims)]
    return [axis_of(node, dim) for dim in dims or range(tensor_of(node).dim())]
