"""A backend that takes operators one by one and is told how by compile specs.

Each supported node becomes a delegate of its own. The compile spec ``max_value`` bounds the number
of elements of a tensor: the compiler refuses larger ones, and so does the runtime half.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from lowerdeck.demo_backends.errors import BlobError, DelegateInputError, UnsupportedNodeError
from lowerdeck.demo_backends.program_inputs import output_nodes, user_inputs
from lowerdeck.demo_backends.sealed_text import seal, unseal
from lowerdeck.demo_backends.text_program import (
    Operators,
    TextProgram,
    TextWriter,
    read_program,
    run_program,
)
from lowerdeck.lowered_module import (
    BackendDetails,
    CompileSpec,
    DelegationSpec,
    Partitioner,
    PartitionResult,
    PreprocessResult,
    constant_tensors,
    tag_constant_data,
)
from lowerdeck.serializer import CompileSpec as StoredSpec
from lowerdeck.torch_base import describe_node

NAME = "BackendWithCompilerDemo"
VERSION = 1
MAX_VALUE = "max_value"
DEFAULT_MAX_VALUE = 2**20

_aten = torch.ops.aten
_OPERATORS: Operators = {
    _aten.add.Tensor: ("add", torch.add),
    _aten.mul.Tensor: ("mul", torch.mul),
    _aten.mm.default: ("mm", torch.mm),
    _aten.sin.default: ("sin", torch.sin),
}


class CompilerDemoPartitioner(Partitioner):
    """Makes a partition of each addition, multiplication, matrix product and sine in float32.

    Args:
        max_value: Largest number of elements that a tensor may have.
    """

    def __init__(self, max_value: int = DEFAULT_MAX_VALUE) -> None:
        super().__init__()
        self._max_value = max_value

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        """Return the program with a tag of its own on each node that fits."""
        specs = [CompileSpec(MAX_VALUE, str(self._max_value).encode())]
        tags: dict[str, DelegationSpec] = {}
        for node in exported_program.graph.nodes:
            if node.target in _OPERATORS and _refusal(node, self._max_value) is None:
                tag = f"compiler_demo_{len(tags)}"
                tags[tag] = DelegationSpec(NAME, specs)
                node.meta["delegation_tag"] = tag
        tag_constant_data(exported_program)
        return PartitionResult(exported_program, tags)


class BackendWithCompilerDemo(BackendDetails):
    """Compiles additions, multiplications, matrix products and sines to a text."""

    version: ClassVar[str] = str(VERSION)
    supported_operators: ClassVar[tuple[str, ...]] = tuple(sorted(map(str, _OPERATORS)))

    @staticmethod
    def preprocess(
        edge_program: ExportedProgram, compile_specs: list[CompileSpec]
    ) -> PreprocessResult:
        """Return the text of one partition, and its weights as named data.

        Args:
            edge_program: The partition.
            compile_specs: ``max_value``: a number in decimal digits.

        Returns:
            The result; the debug identifiers are the numbers of the steps.

        Raises:
            UnsupportedNodeError: A node's operator is unknown, or a tensor is too large.
            BlobError: ``max_value`` is no number.
        """
        limit = _max_value(compile_specs)
        writer = TextWriter(NAME, _OPERATORS)
        for node in user_inputs(edge_program):
            writer.add_input(node)
        constants = constant_tensors(edge_program)
        handles: dict[int, tuple[int, ...]] = {}
        for node in edge_program.graph.nodes:
            if node.name in constants:
                writer.add_constant(node, constants[node.name])
            elif node.op == "call_function":
                reason = _refusal(node, limit)
                if reason is not None:
                    raise UnsupportedNodeError(
                        f"{NAME} cannot compile {describe_node(node)}: {reason}"
                    )
                writer.add_step(node)
                if "debug_handle" in node.meta:
                    handles[len(handles)] = (node.meta["debug_handle"],)
        return PreprocessResult(
            processed_bytes=seal(NAME, VERSION, writer.lines(output_nodes(edge_program))),
            debug_handle_map=handles,
            data_store_output=writer.weights.output(),
        )


@dataclass(frozen=True, slots=True)
class LimitedProgram:
    """A program with the largest number of elements that its inputs may have."""

    program: TextProgram
    max_value: int


class CompilerDemoRuntime:
    """Executes the texts of ``BackendWithCompilerDemo``."""

    def init(
        self,
        blob: memoryview,
        compile_specs: Sequence[StoredSpec],
        named_data: Mapping[str, memoryview],
    ) -> LimitedProgram:
        """Return the program of a blob; ``BlobError`` where blob or specs are damaged."""
        program = read_program(unseal(NAME, VERSION, bytes(blob)), _OPERATORS, named_data)
        return LimitedProgram(program, _max_value(compile_specs))

    def input_count(self, handle: LimitedProgram) -> int:
        """Return how many inputs a program takes."""
        return handle.program.inputs

    def execute(
        self, handle: LimitedProgram, inputs: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the outputs for ``inputs``.

        Args:
            handle: What ``init`` returned.
            inputs: The inputs in order.

        Returns:
            New tensors, in order.

        Raises:
            DelegateInputError: An input is larger than ``max_value``, or one is missing.
            DelegateRunError: A step cannot be computed.
        """
        for position, value in enumerate(inputs):
            if value.numel() > handle.max_value:
                raise DelegateInputError(
                    f"input {position} has {value.numel()} elements, max_value is "
                    f"{handle.max_value}"
                )
        return run_program(handle.program, _OPERATORS, inputs)


def _refusal(node: Node, limit: int) -> str | None:
    for one in (node, *node.all_input_nodes):
        value = one.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
            return f"{one.name} is no float32 tensor"
        # A symbolic size is checked when it is known: at run time.
        sizes = [size for size in value.shape if isinstance(size, int)]
        if len(sizes) == value.dim() and value.numel() > limit:
            return f"{one.name} has {value.numel()} elements, max_value is {limit}"
    if node.kwargs:
        return f"it has the arguments {', '.join(node.kwargs)}"
    return None


def _max_value(specs: Sequence[Any]) -> int:
    for spec in specs:
        if spec.key == MAX_VALUE:
            if not bytes(spec.value).isdigit() or len(spec.value) > 12:
                raise BlobError(f"max_value must be a number, found {bytes(spec.value)[:20]!r}")
            return int(bytes(spec.value))
    return DEFAULT_MAX_VALUE
