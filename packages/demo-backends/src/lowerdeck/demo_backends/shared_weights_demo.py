"""A backend that compiles all methods at once, so that they share their weights.

A model with an encoder that is used by two methods has its weights twice in two blobs. Here
``preprocess_multimethod`` sees the partitions of every method and puts each weight into the named
data once; the blobs refer to it by the hash of its bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from lowerdeck.demo_backends.named_weights import NamedWeights
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
)
from lowerdeck.serializer import CompileSpec as StoredSpec

NAME = "BackendWithSharedWeightsDemo"
VERSION = 1

_aten = torch.ops.aten
_OPERATORS: Operators = {
    _aten.add.Tensor: ("add", torch.add),
    _aten.linear.default: ("linear", torch.nn.functional.linear),
    _aten.relu.default: ("relu", torch.relu),
    _aten.tanh.default: ("tanh", torch.tanh),
}


class SharedWeightsDemoPartitioner(Partitioner):
    """Gives linear layers, additions, relu and tanh in float32 to the backend."""

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        """Return the program with a tag on each supported node."""
        tags = {}
        proposal = propose_partitions(exported_program.graph_module, _is_supported)
        for number, nodes in enumerate(proposal):
            tag = f"shared_weights_{number}"
            tags[tag] = DelegationSpec(NAME, [])
            for node in nodes:
                node.meta["delegation_tag"] = tag
        tag_constant_data(exported_program)
        return PartitionResult(exported_program, tags)


class BackendWithSharedWeightsDemo(BackendDetails):
    """Compiles the partitions of all methods, each weight once."""

    version: ClassVar[str] = str(VERSION)
    supported_operators: ClassVar[tuple[str, ...]] = tuple(sorted(map(str, _OPERATORS)))

    @staticmethod
    def preprocess(
        edge_program: ExportedProgram,
        compile_specs: list[CompileSpec],  # noqa: ARG004  (there is nothing to set)
    ) -> PreprocessResult:
        """Return the text of one partition of a program that stands alone.

        Args:
            edge_program: The partition.
            compile_specs: Not needed.

        Returns:
            The text and its weights.

        Raises:
            UnsupportedNodeError: A node's operator is unknown.
        """
        return _compiled(edge_program, NamedWeights())

    @classmethod
    def preprocess_multimethod(
        cls,
        edge_programs: Mapping[str, Sequence[ExportedProgram]],
        compile_specs: Mapping[str, Sequence[list[CompileSpec]]],  # noqa: ARG003
    ) -> dict[str, list[PreprocessResult]]:
        """Return the texts of all partitions of all methods, which share one store of weights.

        Args:
            edge_programs: For each method its partitions.
            compile_specs: Not needed.

        Returns:
            For each method one result per partition. Each names all weights seen so far: a store
            that merges them keeps one of each.

        Raises:
            UnsupportedNodeError: A node's operator is unknown.
        """
        weights = NamedWeights()
        return {
            method: [_compiled(program, weights) for program in programs]
            for method, programs in edge_programs.items()
        }


class SharedWeightsDemoRuntime:
    """Executes the texts of ``BackendWithSharedWeightsDemo``."""

    def init(
        self,
        blob: memoryview,
        compile_specs: Sequence[StoredSpec],  # noqa: ARG002  (there is nothing to set)
        named_data: Mapping[str, memoryview],
    ) -> TextProgram:
        """Return the program of a blob; its weights are views on those of the file."""
        return read_program(unseal(NAME, VERSION, bytes(blob)), _OPERATORS, named_data)

    def input_count(self, handle: TextProgram) -> int:
        """Return how many inputs a program takes."""
        return handle.inputs

    def execute(self, handle: TextProgram, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the outputs for ``inputs``."""
        return run_program(handle, _OPERATORS, inputs)


def _is_supported(node: Node) -> bool:
    value = node.meta.get("val")
    return (
        node.target in _OPERATORS
        and not node.kwargs
        and isinstance(value, torch.Tensor)
        and value.dtype == torch.float32
    )


def _compiled(program: ExportedProgram, weights: NamedWeights) -> PreprocessResult:
    writer = TextWriter(NAME, _OPERATORS, weights)
    for node in user_inputs(program):
        writer.add_input(node)
    constants = constant_tensors(program)
    for node in program.graph.nodes:
        if node.name in constants:
            writer.add_constant(node, constants[node.name])
        elif node.op == "call_function":
            writer.add_step(node)
    return PreprocessResult(
        processed_bytes=seal(NAME, VERSION, writer.lines(output_nodes(program))),
        data_store_output=weights.output(),
    )
