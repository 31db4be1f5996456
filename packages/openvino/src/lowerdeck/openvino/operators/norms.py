"""Normalization operators."""

from __future__ import annotations

import openvino
import torch
from openvino import Output, opset13
from torch.fx import Node

from lowerdeck.lowered_module import PartitionView, arguments_of, visits
from lowerdeck.openvino.layout import ints
from lowerdeck.openvino.operators.dtypes import FLOATS
from lowerdeck.openvino.translation import TYPES, Translation, axis_of, tensor_of


def _first_alone(node: Node) -> bool | str:
    """Accept a norm whose mean and deviation are unused."""
    readers = [user for user in node.users if user.args[1:] != (0,) and user.users]
    return not readers or f"{readers[0].name} reads its mean or deviation"


def _trained(node: Node) -> bool | str:
    arguments = arguments_of(node)
    if arguments.get("training"):
        return "it is in training mode"
    return arguments["running_mean"] is not None or "it has no running mean"


def _batch(node: Node) -> bool | str:
    answer = _trained(node)
    has_several_results = isinstance(node.meta["val"], list | tuple)
    return _first_alone(node) if answer is True and has_several_results else answer


_BATCH = ("aten.batch_norm", "aten._native_batch_norm_legit_no_training")


class Norms(Translation):
    """Batch, layer, group, RMS and weight norms."""

    def give_first(self, part: PartitionView, node: Node, output: openvino.Node) -> None:
        """Record the value of a node, or of the first of its results."""
        if isinstance(node.meta["val"], torch.Tensor):
            self.give(part, node, output)
        elif (first := part.parts(node)[0]) is not None:
            self.give(part, first, output)

    @visits(*_BATCH, dtypes=FLOATS, when=_batch)
    def batch_norm(self, part: PartitionView, node: Node) -> None:
        """Visit a batch norm in inference mode."""
        arguments = arguments_of(node)
        mean, variance = self.read(arguments["running_mean"]), self.read(arguments["running_var"])
        channels = tensor_of(arguments["running_mean"])
        normalized = opset13.batch_norm_inference(
            self.read(arguments["input"]),
            self._filled(arguments["weight"], 1.0, channels),
            self._filled(arguments["bias"], 0.0, channels),
            *(mean, variance, float(arguments["eps"])),
        )
        self.give_first(part, node, normalized)

    @visits("aten.layer_norm", dtypes=FLOATS)
    @visits("aten.native_layer_norm", dtypes=FLOATS, when=_first_alone)
    def layer_norm(self, part: PartitionView, node: Node) -> None:
        """Visit a layer norm."""
        arguments = arguments_of(node)
        axes = list(range(-len(arguments["normalized_shape"]), 0))
        normalized = opset13.mvn(
            self.read(arguments["input"]),
            ints(axes),
            *(True, float(arguments["eps"]), "inside_sqrt"),
        )
        if arguments["weight"] is not None:
            normalized = opset13.multiply(normalized, self.read(arguments["weight"]))
        if arguments["bias"] is not None:
            normalized = opset13.add(normalized, self.read(arguments["bias"]))
        self.give_first(part, node, normalized)

    @visits("aten.group_norm", dtypes=FLOATS)
    @visits("aten.native_group_norm", dtypes=FLOATS, when=_first_alone)
    def group_norm(self, part: PartitionView, node: Node) -> None:
        """Visit a group norm."""
        arguments = arguments_of(node)
        tensor = tensor_of(arguments["input"])
        channels = torch.empty(int(tensor.shape[1]), dtype=tensor.dtype)
        groups = arguments["num_groups"] if "num_groups" in arguments else arguments["group"]
        normalized = opset13.group_normalization(
            self.read(arguments["input"]),
            self._filled(arguments["weight"], 1.0, channels),
            self._filled(arguments["bias"], 0.0, channels),
            *(int(groups), float(arguments["eps"])),
        )
        self.give_first(part, node, normalized)

    @visits("aten.rms_norm", dtypes=FLOATS)
    def rms_norm(self, part: PartitionView, node: Node) -> None:
        """Visit ``rms_norm``, in float32 as in torch."""
        arguments = arguments_of(node)
        eps = torch.finfo(torch.float32).eps if arguments["eps"] is None else arguments["eps"]
        value = self.read(arguments["input"], torch.float32)
        axes = ints(list(range(-len(arguments["normalized_shape"]), 0)))
        mean = opset13.reduce_mean(opset13.multiply(value, value), axes, True)
        normalized = opset13.divide(value, opset13.sqrt(opset13.add(mean, self.read(eps))))
        if arguments["weight"] is not None:
            normalized = opset13.multiply(
                normalized, self.read(arguments["weight"], torch.float32)
            )
        dtype = tensor_of(node).dtype
        self.give(
            part,
            node,
            normalized if dtype == torch.float32 else opset13.convert(normalized, TYPES[dtype]),
        )

    @visits("aten._weight_norm", dtypes=FLOATS)
    def weight_norm(self, part: PartitionView, node: Node) -> None:
        """Visit a weight norm."""
        arguments = arguments_of(node)
        value = self.read(arguments["v"])
        # torch uses -1 for all dimensions here, not for the last one.
        kept_axis = (
            arguments["dim"]
            if arguments["dim"] == -1
            else axis_of(arguments["v"], arguments["dim"])
        )
        axes = [axis for axis in range(tensor_of(arguments["v"]).dim()) if axis != kept_axis]
        direction = opset13.divide(value, opset13.reduce_l2(value, ints(axes), True))
        self.give(part, node, opset13.multiply(direction, self.read(arguments["g"])))

    def _filled(self, tensor: Node | None, otherwise: float, like: torch.Tensor) -> Output:
        if tensor is not None:
            return self.read(tensor)
        filled = torch.full(tuple(like.shape), otherwise, dtype=like.dtype)
        return opset13.constant(filled.numpy()).output(0)
