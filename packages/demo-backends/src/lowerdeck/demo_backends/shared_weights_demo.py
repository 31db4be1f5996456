"""Demo of a backend that compiles the partitions of all methods together.

A model with an encoder that two methods use has its weights twice in two blobs. Here
``preprocess_multimethod`` is given every method's partitions and hands all results one store of
weights; the texts refer to a weight by the hash of its bytes, so that the file holds it once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from lowerdeck.demo_backends.text_backend import Kernels, TextBackend, TextRuntime, is_positional
from lowerdeck.lowered_module import (
    CompileSpec,
    DeclarativePartitioner,
    PartitionView,
    PreprocessResult,
    visits,
)
from lowerdeck.serializer import NamedDataStore

KERNELS: Kernels = {
    "aten.add.Tensor": torch.add,
    "aten.linear.default": torch.nn.functional.linear,
    "aten.relu.default": torch.relu,
    "aten.tanh.default": torch.tanh,
}


class BackendWithSharedWeightsDemo(TextBackend):
    """Compiles the partitions of all methods, each weight once."""

    kernels = KERNELS

    @visits(*KERNELS, dtypes={torch.float32}, when=is_positional)
    def any_of_them(self, part: PartitionView, node: Node) -> None:
        """Add one step."""
        self.add_call(part, node)

    @classmethod
    def preprocess_multimethod(
        cls,
        edge_programs: Mapping[str, Sequence[ExportedProgram]],
        compile_specs: Mapping[str, Sequence[list[CompileSpec]]],
    ) -> dict[str, list[PreprocessResult]]:
        """Return the texts of all partitions of all methods, which share one store of weights.

        Args:
            edge_programs: For each method its partitions.
            compile_specs: For each method one list of specs per partition; there is nothing to
                set.

        Returns:
            For each method one result per partition.

        Raises:
            UnsupportedNodeError: A node's operator is unknown.
        """
        results = super().preprocess_multimethod(edge_programs, compile_specs)
        every = [result for value in results.values() for result in value]
        weights = NamedDataStore()
        for result in every:
            if result.data_store_output is not None:
                weights.merge_named_data_store(result.data_store_output)
        for result in every:
            result.data_store_output = weights.get_named_data_store_output()
        return results


class SharedWeightsDemoPartitioner(DeclarativePartitioner):
    """Gives linear layers, additions, relu and tanh in float32 to the backend."""

    def __init__(self) -> None:
        super().__init__(BackendWithSharedWeightsDemo)


class SharedWeightsDemoRuntime(TextRuntime):
    """Executes the texts of ``BackendWithSharedWeightsDemo``."""

    backend: ClassVar[type[TextBackend]] = BackendWithSharedWeightsDemo
