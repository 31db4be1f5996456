"""A backend that owns mutable state: the key-value cache of an attention lives in the delegate.

The program must be functional (``exported.run_decompositions({})``), so that its signature says
which outputs are new values of which buffers. The partition then owns those buffers: no call
passes them in or out, the runtime half keeps them between calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Node

from lowerdeck.demo_backends.errors import BlobError, DelegateRunError
from lowerdeck.demo_backends.named_weights import NamedWeights, read_weight
from lowerdeck.demo_backends.program_inputs import output_nodes, user_inputs
from lowerdeck.demo_backends.sealed_text import seal, unseal
from lowerdeck.demo_backends.text_program import (
    Operators,
    TextProgram,
    TextWriter,
    read_program,
    run_program,
)
from lowerdeck.graph_fuser import propose_partitions
from lowerdeck.lowered_module import (
    BackendDetails,
    CompileSpec,
    DelegationSpec,
    Partitioner,
    PartitionResult,
    PreprocessResult,
    constant_tensors,
    tag_constant_data,
    tag_mutated_buffer,
)
from lowerdeck.serializer import CompileSpec as StoredSpec

NAME = "BackendWithStateDemo"
VERSION = 1

_aten = torch.ops.aten
_OPERATORS: Operators = {
    _aten.add.Tensor: ("add", torch.add),
    _aten.index_copy.default: ("index_copy", torch.index_copy),
    _aten.matmul.default: ("matmul", torch.matmul),
    _aten.softmax.int: ("softmax", torch.softmax),
    _aten.t.default: ("t", torch.t),
}


class KvCacheAttention(nn.Module):
    """Attention of one new token to all tokens so far, whose keys and values it keeps.

    Args:
        length: Number of tokens that the cache holds.
        width: Width of a token.
    """

    def __init__(self, length: int = 8, width: int = 4) -> None:
        super().__init__()
        self.keys: nn.Buffer = nn.Buffer(torch.zeros(length, width))
        self.values: nn.Buffer = nn.Buffer(torch.zeros(length, width))

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        position: torch.Tensor,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        """Return the attended value of shape ``[1, width]``, and keep key and value."""
        self.keys.index_copy_(0, position, key)
        self.values.index_copy_(0, position, value)
        weights = torch.softmax(query @ self.keys.t() + mask, -1)
        return weights @ self.values


class StateDemoPartitioner(Partitioner):
    """Gives attention with a cache to the backend, and the cache with it."""

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        """Return the program with a tag on each supported node and on what it owns."""
        tags = {}
        proposal = propose_partitions(exported_program.graph_module, _is_supported)
        for number, nodes in enumerate(proposal):
            tag = f"state_{number}"
            tags[tag] = DelegationSpec(NAME, [])
            for node in nodes:
                node.meta["delegation_tag"] = tag
        tag_constant_data(exported_program)
        tag_mutated_buffer(exported_program)
        return PartitionResult(exported_program, tags)


class BackendWithStateDemo(BackendDetails):
    """Compiles attention with a cache to a text that says what its state is."""

    version: ClassVar[str] = str(VERSION)
    supported_operators: ClassVar[tuple[str, ...]] = tuple(sorted(map(str, _OPERATORS)))

    @staticmethod
    def preprocess(
        edge_program: ExportedProgram,
        compile_specs: list[CompileSpec],  # noqa: ARG004  (there is nothing to set)
    ) -> PreprocessResult:
        """Return the text of one partition, with its weights and the first value of its state.

        Args:
            edge_program: The partition; the buffers it mutates are its state.
            compile_specs: Not needed.

        Returns:
            The text: a line that lists the state, and a program that takes the state before the
            inputs and returns the new state before the outputs.

        Raises:
            UnsupportedNodeError: A node's operator is unknown.
        """
        state = _state(edge_program)
        placeholders = {node.name: node for node in edge_program.graph.nodes}
        writer = TextWriter(NAME, _OPERATORS, NamedWeights())
        for name in state:
            writer.add_input(placeholders[name])
        for node in user_inputs(edge_program):
            writer.add_input(node)
        constants = constant_tensors(edge_program)
        for node in edge_program.graph.nodes:
            if node.name in constants:
                writer.add_constant(node, constants[node.name])
            elif node.op == "call_function":
                writer.add_step(node)
        new: dict[str | None, Node | None] = {}
        returned: list[Node | None] = []
        specs = edge_program.graph_signature.output_specs
        for value, spec in zip(output_nodes(edge_program), specs, strict=True):
            if spec.kind == OutputKind.BUFFER_MUTATION:
                new[spec.target] = value
            else:
                returned.append(value)
        order = [new.get(target, placeholders[name]) for name, (target, _) in state.items()]
        first = [writer.weights.add(tensor) for _, tensor in state.values()]
        lines = [" ".join(["state", *first]), *writer.lines([*order, *returned])]
        return PreprocessResult(
            processed_bytes=seal(NAME, VERSION, lines),
            data_store_output=writer.weights.output(),
        )


@dataclass(slots=True)
class StatefulProgram:
    """A program and its state.

    Attributes:
        program: Takes the state before the inputs, returns the new state before the outputs.
        state: What it is now; the handle's own.
    """

    program: TextProgram
    state: list[torch.Tensor]


class StateDemoRuntime:
    """Executes the texts of ``BackendWithStateDemo`` and keeps their state between calls."""

    def init(
        self,
        blob: memoryview,
        compile_specs: Sequence[StoredSpec],  # noqa: ARG002  (there is nothing to set)
        named_data: Mapping[str, memoryview],
    ) -> StatefulProgram:
        """Return the program of a blob with its first state; ``BlobError`` where it is damaged."""
        lines = unseal(NAME, VERSION, bytes(blob))
        word, *first = lines[0].split(" ") if lines else [""]
        if word != "state":
            raise BlobError(f"the first line must list the state, found {word[:40]!r}")
        program = read_program(lines[1:], _OPERATORS, named_data)
        if len(first) > min(program.inputs, len(program.outputs)):
            raise BlobError(f"{len(first)} states, but {program.inputs} inputs")
        return StatefulProgram(program, [read_weight(one, named_data).clone() for one in first])

    def input_count(self, handle: StatefulProgram) -> int:
        """Return how many inputs the caller gives."""
        return handle.program.inputs - len(handle.state)

    def execute(
        self, handle: StatefulProgram, inputs: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the outputs for ``inputs``, and keep the new state.

        Args:
            handle: What ``init`` returned.
            inputs: The inputs in order.

        Returns:
            New tensors, in order.

        Raises:
            DelegateInputError: Another number of inputs is needed.
            DelegateRunError: A step cannot be computed; the state is as it was.
        """
        results = run_program(handle.program, _OPERATORS, [*handle.state, *inputs])
        count = len(handle.state)
        for old, new in zip(handle.state, results[:count], strict=True):
            if old.shape != new.shape or old.dtype != new.dtype:
                raise DelegateRunError(
                    f"state of {old.dtype}{list(old.shape)} became {new.dtype}{list(new.shape)}"
                )
        handle.state[:] = results[:count]
        return results[count:]


def _is_supported(node: Node) -> bool:
    return node.target in _OPERATORS and not node.kwargs


def _state(program: ExportedProgram) -> dict[str, tuple[str, torch.Tensor]]:
    """Return the placeholders of mutated buffers: their names in the state and their values."""
    mutated = set(program.graph_signature.buffers_to_mutate.values())
    held = {**program.constants, **program.state_dict}
    return {
        spec.arg.name: (str(spec.target), held[str(spec.target)])
        for spec in program.graph_signature.input_specs
        if spec.kind == InputKind.BUFFER and spec.target in mutated
    }
