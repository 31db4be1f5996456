"""Demo of debug maps in a compiler that fuses and decomposes.

A convolution whose only user is a relu is fused with it into one step; a tangent becomes three
steps. The runtime logs each step with an identifier, and the debug map lists the nodes of
each identifier::

    BackendWithDelegateMappingDemo 2 0badc0de
    inputs float32
    conv_relu_op 0 %0 @KEY/float32/16x3x3x3 - [1,1] [1,1] [1,1] #1
    sin_op 1 %1
    cos_op 2 %1
    div_op 3 %2 %3
    outputs %4
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.fx import Node

from lowerdeck.demo_backends.text_backend import Kernels, TextBackend, TextRuntime
from lowerdeck.demo_backends.text_format import Value
from lowerdeck.lowered_module import (
    CompileSpec,
    DeclarativePartitioner,
    PartitionView,
    UnsupportedOperatorError,
    arguments_of,
    operator_name,
    visits,
)
from lowerdeck.torch_base import describe_node

OWN_IDENTIFIERS = CompileSpec("debug_identifiers", b"own")
"""Compile spec that selects identifiers such as ``"tan/sin_op"`` instead of 0, 1, 2, ..."""

KERNELS: Kernels = {
    "conv_op": torch.conv2d,
    "conv_relu_op": lambda *operands: torch.relu_(torch.conv2d(*operands)),
    "relu_op": torch.relu,
    "sin_op": torch.sin,
    "cos_op": torch.cos,
    "div_op": torch.div,
}
_FLOAT = {torch.float32}
_CONVOLUTIONS = ("aten.conv2d.default", "aten.convolution.default")
_RELUS = ("aten.relu.default", "aten.relu_.default")


def _not_of_images(node: Node) -> str | None:
    """Return why the runtime does not support a convolution, or None."""
    if arguments_of(node).get("transposed"):
        return "it is transposed"
    return None if node.meta["val"].dim() == 4 else "its input is not a batch of images"


class BackendWithDelegateMappingDemo(TextBackend):
    """Compiles convolutions, relu and tan to a text format, with a debug map."""

    kernels = KERNELS

    @visits(*_CONVOLUTIONS, dtypes=_FLOAT, when=lambda node: _not_of_images(node) or True)
    def convolution(self, part: PartitionView, node: Node) -> None:
        """Add a step, unless the only user is a relu, whose visitor then adds the fused step."""
        users = [operator_name(user) for user in node.users]
        if len(users) != 1 or users[0] not in _RELUS:
            self.operands[node] = self._step(part, "conv_op", [node], _settings(node))

    @visits(*_RELUS, dtypes=_FLOAT)
    def relu(self, part: PartitionView, node: Node) -> None:
        """Add a step for the relu, fused with the preceding convolution if that has no step."""
        source = arguments_of(node)["self"]
        if source in self.operands:
            self.operands[node] = self._step(part, "relu_op", [node], [source])
        else:
            fused = [source, node]
            self.operands[node] = self._step(part, "conv_relu_op", fused, _settings(source))

    @visits("aten.tan.default", dtypes=_FLOAT)
    def tan(self, part: PartitionView, node: Node) -> None:
        """Add three steps: sine, cosine and quotient."""
        x = arguments_of(node)["self"]
        sine = self._step(part, "sin_op", [node], [x])
        cosine = self._step(part, "cos_op", [node], [x])
        self.operands[node] = self._step(part, "div_op", [node], [sine, cosine])

    def _step(
        self, part: PartitionView, op: str, nodes: list[Node], arguments: list[Any]
    ) -> Value:
        own = part.compile_specs.get(OWN_IDENTIFIERS.key) == OWN_IDENTIFIERS.value
        identifier = f"{'+'.join(node.name for node in nodes)}/{op}" if own else None
        return self.add_step(part, op, arguments, nodes, identifier)

    @staticmethod
    def get_test_model_and_inputs() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        """Return a model that this backend delegates completely, and its inputs.

        Returns:
            Two convolutions with relu (3 to 16 to 32 channels) and a tangent, with seeded
            weights; and a batch of four 64x64 images.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return ConvReLUTan().eval(), (torch.randn(4, 3, 64, 64),)


def _settings(node: Node) -> list[Any]:
    reason = _not_of_images(node)
    if reason is not None:
        raise UnsupportedOperatorError(f"{describe_node(node)} cannot be compiled: {reason}")
    arguments = arguments_of(node)
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    return [arguments[name] for name in names]


class DelegateMappingDemoPartitioner(DeclarativePartitioner):
    """Delegates float32 2-D convolutions, relu and tan to the backend.

    Args:
        compile_specs: The settings of the backend, such as ``OWN_IDENTIFIERS``.
    """

    def __init__(self, compile_specs: Sequence[CompileSpec] = ()) -> None:
        super().__init__(BackendWithDelegateMappingDemo, compile_specs=compile_specs)


class DelegateMappingDemoRuntime(TextRuntime):
    """Executes the blobs of ``BackendWithDelegateMappingDemo``."""

    backend: ClassVar[type[TextBackend]] = BackendWithDelegateMappingDemo


class ConvReLUTan(nn.Module):
    """Two convolutions with relu, then a tangent."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1: nn.Conv2d = nn.Conv2d(3, 16, 3, padding=1)
        self.conv2: nn.Conv2d = nn.Conv2d(16, 32, 3, padding=1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return features of shape ``[N, 32, H, W]`` for images of shape ``[N, 3, H, W]``."""
        x = torch.relu(self.conv1(images))
        return torch.tan(torch.relu(self.conv2(x)))
