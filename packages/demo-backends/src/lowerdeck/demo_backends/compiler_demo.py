"""What one learns here: how to write a partitioner by hand, and how compile specs travel.

Each supported node becomes a delegate of its own. The compile spec ``max_value``, the largest
number of elements that a tensor may have, is made by the partitioner and read three times: by the
partitioner itself, by the compiler, and, as the file carries it, by the runtime half, which alone
knows the sizes that were symbolic before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from lowerdeck.demo_backends.errors import BlobError, DelegateInputError, UnsupportedNodeError
from lowerdeck.demo_backends.text_backend import Kernels, TextBackend, TextRuntime, is_positional
from lowerdeck.demo_backends.text_format import TextProgram
from lowerdeck.lowered_module import (
    DELEGATION_TAG,
    CompileSpec,
    DelegationSpec,
    Partitioner,
    PartitionResult,
    PartitionView,
    operator_name,
    tag_constant_data,
    visits,
)
from lowerdeck.serializer import CompileSpec as StoredSpec
from lowerdeck.torch_base import describe_node

MAX_VALUE = "max_value"
DEFAULT_MAX_VALUE = 2**20
KERNELS: Kernels = {
    "aten.add.Tensor": torch.add,
    "aten.mul.Tensor": torch.mul,
    "aten.mm.default": torch.mm,
    "aten.sin.default": torch.sin,
}


class BackendWithCompilerDemo(TextBackend):
    """Compiles additions, multiplications, matrix products and sines to a text."""

    kernels = KERNELS

    def begin_partition(self, part: PartitionView) -> None:
        """Read ``max_value``; ``BlobError`` where it is no number."""
        super().begin_partition(part)
        self._max_value = _number(part.compile_specs.get(MAX_VALUE))

    @visits(*KERNELS, dtypes={torch.float32}, when=is_positional)
    def any_of_them(self, part: PartitionView, node: Node) -> None:
        """Add one step."""
        reason = _misfit(node, self._max_value)
        if reason is not None:
            raise UnsupportedNodeError(f"{describe_node(node)} cannot be compiled: {reason}")
        self.add_call(part, node)


class CompilerDemoPartitioner(Partitioner):
    """Makes a partition of each addition, multiplication, matrix product and sine in float32.

    Args:
        max_value: Largest number of elements that a tensor may have.
    """

    def __init__(self, max_value: int = DEFAULT_MAX_VALUE) -> None:
        super().__init__()
        self._max_value = max_value
        self._visited = BackendWithCompilerDemo.partitioner()

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        """Return the program with a tag of its own on each node that fits."""
        specs = [CompileSpec(MAX_VALUE, str(self._max_value).encode())]
        tags: dict[str, DelegationSpec] = {}
        refused: dict[str, str] = {}
        for node in exported_program.graph.nodes:
            if operator_name(node) not in KERNELS:
                continue
            reason = self._visited.objection(node) or _misfit(node, self._max_value)
            if reason is not None:
                refused[node.name] = reason
                continue
            node.meta[DELEGATION_TAG] = tag = f"compiler_demo_{len(tags)}"
            tags[tag] = DelegationSpec(BackendWithCompilerDemo.__name__, specs)
        tag_constant_data(exported_program)
        self.refused: Mapping[str, str] = (
            refused  # for summaries and pictures of the lowered program
        )
        return PartitionResult(exported_program, tags)


@dataclass(frozen=True, slots=True)
class LimitedProgram(TextProgram):
    """A program with the largest number of elements that its inputs may have."""

    max_value: int


class CompilerDemoRuntime(TextRuntime):
    """Executes the texts of ``BackendWithCompilerDemo``."""

    backend: ClassVar[type[TextBackend]] = BackendWithCompilerDemo

    def init(
        self,
        blob: memoryview,
        compile_specs: Sequence[StoredSpec],
        named_data: Mapping[str, memoryview],
    ) -> LimitedProgram:
        """Return the program of a blob; ``BlobError`` where blob or specs are damaged."""
        program: TextProgram = super().init(blob, compile_specs, named_data)
        limit = next((spec.value for spec in compile_specs if spec.key == MAX_VALUE), None)
        return LimitedProgram(program.inputs, program.steps, program.outputs, _number(limit))

    def execute_logged(
        self, handle: LimitedProgram, inputs: Sequence[torch.Tensor], log: Any
    ) -> list[torch.Tensor]:
        """Return the outputs; ``DelegateInputError`` where an input exceeds ``max_value``."""
        for position, value in enumerate(inputs):
            if value.numel() > handle.max_value:
                raise DelegateInputError(
                    f"input {position} has {value.numel()} elements, max_value is "
                    f"{handle.max_value}"
                )
        return super().execute_logged(handle, inputs, log)


def _misfit(node: Node, limit: int) -> str | None:
    for one in (node, *node.all_input_nodes):
        value = one.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return f"{one.name} is no tensor"
        # A symbolic size is checked when it is known: at run time.
        if all(isinstance(size, int) for size in value.shape) and value.numel() > limit:
            return f"{one.name} has {value.numel()} elements, max_value is {limit}"
    return None


def _number(value: Any) -> int:
    text = str(DEFAULT_MAX_VALUE).encode() if value is None else bytes(value)
    if not text.isdigit() or len(text) > 12:
        raise BlobError(f"max_value must be a number, found {text[:20]!r}")
    return int(text)
