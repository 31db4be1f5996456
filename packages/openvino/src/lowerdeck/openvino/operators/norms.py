"""Norms over channels, groups and layers."""

from __future__ import annotations

import openvino
import torch
from openvino import Output, opset13
from torch.fx import Node

from lowerdeck.lowered_module import PartitionView, arguments_of, visits
from lowerdeck.openvino.layout import whole
from lowerdeck.openvino.operators.dtypes import FLOATS
from lowerdeck.openvino.translation import TYPES, Translation, axis_of, tensor_of


def _first_alone(node: Node) -> bool | str:
    """Take a norm whose mean and deviation nobody reads."""
    read = [user for user in node.users if user.args[1:] != (0,) and user.users]
    return not read or f"{read[0].name} reads its mean or its deviation"


def _trained(node: Node) -> bool | str:
    found = arguments_of(node)
    if found.get("training"):
        return "it is trained"
    return found["running_mean"] is not None or "it has no running mean"


def _batch(node: Node) -> bool | str:
    answer = _trained(node)
    several = isinstance(node.meta["val"], list | tuple)
    return _first_alone(node) if answer is True and several else answer


_BATCH = ("aten.batch_norm", "aten._native_batch_norm_legit_no_training")


class Norms(Translation):
    """Norms."""

    def give_first(self, part: PartitionView, node: Node, made: openvino.Node) -> None:
        """Give a node its value, or the first of its values, where nobody reads the others."""
        if isinstance(node.meta["val"], torch.Tensor):
            self.give(part, node, made)
        elif (first := part.parts(node)[0]) is not None:
            self.give(part, first, made)

    @visits(*_BATCH, dtypes=FLOATS, when=_batch)
    def batch_norm(self, part: PartitionView, node: Node) -> None:
        """Visit a norm with the running mean and variance."""
        found = arguments_of(node)
        mean, variance = self.read(found["running_mean"]), self.read(found["running_var"])
        channels = tensor_of(found["running_mean"])
        made = opset13.batch_norm_inference(
            self.read(found["input"]),
            self._filled(found["weight"], 1.0, channels),
            self._filled(found["bias"], 0.0, channels),
            *(mean, variance, float(found["eps"])),
        )
        self.give_first(part, node, made)

    @visits("aten.layer_norm", dtypes=FLOATS)
    @visits("aten.native_layer_norm", dtypes=FLOATS, when=_first_alone)
    def layer_norm(self, part: PartitionView, node: Node) -> None:
        """Visit a norm over the last dimensions."""
        found = arguments_of(node)
        axes = list(range(-len(found["normalized_shape"]), 0))
        made = opset13.mvn(
            self.read(found["input"]),
            whole(axes),
            *(True, float(found["eps"]), "inside_sqrt"),
        )
        if found["weight"] is not None:
            made = opset13.multiply(made, self.read(found["weight"]))
        if found["bias"] is not None:
            made = opset13.add(made, self.read(found["bias"]))
        self.give_first(part, node, made)

    @visits("aten.group_norm", dtypes=FLOATS)
    @visits("aten.native_group_norm", dtypes=FLOATS, when=_first_alone)
    def group_norm(self, part: PartitionView, node: Node) -> None:
        """Visit a norm over groups of channels."""
        found = arguments_of(node)
        tensor = tensor_of(found["input"])
        channels = torch.empty(int(tensor.shape[1]), dtype=tensor.dtype)
        groups = found["num_groups"] if "num_groups" in found else found["group"]
        made = opset13.group_normalization(
            self.read(found["input"]),
            self._filled(found["weight"], 1.0, channels),
            self._filled(found["bias"], 0.0, channels),
            *(int(groups), float(found["eps"])),
        )
        self.give_first(part, node, made)

    @visits("aten.rms_norm", dtypes=FLOATS)
    def rms_norm(self, part: PartitionView, node: Node) -> None:
        """Visit a norm by the root of the mean square, in float32, as torch computes it."""
        found = arguments_of(node)
        eps = torch.finfo(torch.float32).eps if found["eps"] is None else found["eps"]
        value = self.read(found["input"], torch.float32)
        axes = whole(list(range(-len(found["normalized_shape"]), 0)))
        mean = opset13.reduce_mean(opset13.multiply(value, value), axes, True)
        made = opset13.divide(value, opset13.sqrt(opset13.add(mean, self.read(eps))))
        if found["weight"] is not None:
            made = opset13.multiply(made, self.read(found["weight"], torch.float32))
        wanted = tensor_of(node).dtype
        self.give(
            part, node, made if wanted == torch.float32 else opset13.convert(made, TYPES[wanted])
        )

    @visits("aten._weight_norm", dtypes=FLOATS)
    def weight_norm(self, part: PartitionView, node: Node) -> None:
        """Visit a weight of given lengths: a constant, which OpenVINO computes ahead of time."""
        found = arguments_of(node)
        value = self.read(found["v"])
        # -1 is torch's word for all dimensions, not for the last one.
        kept = found["dim"] if found["dim"] == -1 else axis_of(found["v"], found["dim"])
        axes = [axis for axis in range(tensor_of(found["v"]).dim()) if axis != kept]
        made = opset13.divide(value, opset13.reduce_l2(value, whole(axes), True))
        self.give(part, node, opset13.multiply(made, self.read(found["g"])))

    def _filled(self, found: Node | None, otherwise: float, like: torch.Tensor) -> Output:
        if found is not None:
            return self.read(found)
        filled = torch.full(tuple(like.shape), otherwise, dtype=like.dtype)
        return opset13.constant(filled.numpy()).output(0)
