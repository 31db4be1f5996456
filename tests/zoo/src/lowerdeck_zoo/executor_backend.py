"""A backend of nested programs: a blob is a ``.pte``, to any depth.

Without compile specs the partition is emitted as it is, for the kernels of a nested runner. With
``inner_backend`` it is first given whole to that backend, and the blob is the delegate's
``buffer()``; that backend may be this one again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from lowerdeck.emitter import emit
from lowerdeck.lowered_module import (
    BackendDetails,
    CompileSpec,
    LoweredBackendModule,
    NodePartitioner,
    PreprocessResult,
    operator_name,
    register_backend,
    to_backend,
)
from lowerdeck.runner import LoadedMethod, RunnerError, load
from lowerdeck.serializer import CompileSpec as StoredSpec
from lowerdeck.serializer import FormatError
from lowerdeck.torch_base import OpOverload

NAME = "ExecutorBackend"
INNER_BACKEND = "inner_backend"
DEEPEST = 16


class ExecutorPartitioner(NodePartitioner):
    """Gives every operator of torch to the backend, in as few partitions as can be.

    Args:
        inner_backends: What is inside the blob, from the outside in; none for plain kernels.
    """

    def __init__(self, inner_backends: Sequence[str] = ()) -> None:
        path = "/".join(inner_backends)
        specs = [CompileSpec(INNER_BACKEND, path.encode())] if path else []
        super().__init__(NAME, compile_specs=specs)

    def objection(self, node: Node) -> str | None:
        """Return None for each call of an operator whose numbers are sizes of its tensors."""
        if not isinstance(node.target, OpOverload):
            return f"{operator_name(node)} is not an operator"
        numbers = (torch.SymInt, torch.SymFloat, torch.SymBool)
        for source in node.all_input_nodes:
            # A file takes the number that was traced as an input, and no other one.
            computed = isinstance(source.meta.get("val"), numbers)
            if computed and not isinstance(source.target, OpOverload):
                return f"it takes the computed number {source.name}"
        return None


@register_backend
class ExecutorBackend(BackendDetails):
    """Compiles a partition to another ``.pte``."""

    version = "1"

    @staticmethod
    def preprocess(
        edge_program: ExportedProgram, compile_specs: list[CompileSpec]
    ) -> PreprocessResult:
        """Return one partition as the bytes of a file.

        Args:
            compile_specs: ``inner_backend``: ids of backends with slashes between, from the
                outside in.

        Returns:
            The file; it holds its weights itself.

        Raises:
            lowerdeck.lowered_module.LoweringError: An inner backend refuses the partition.
            lowerdeck.emitter.EmitterError: The partition cannot be emitted.
        """
        path = next((item.value for item in compile_specs if item.key == INNER_BACKEND), b"")
        if not path:
            return PreprocessResult(processed_bytes=emit(edge_program).to_bytes())
        first, _, rest = path.decode().partition("/")
        inner_specs = [CompileSpec(INNER_BACKEND, rest.encode())] if rest else []
        inner: LoweredBackendModule = to_backend(first, edge_program, inner_specs)
        return PreprocessResult(processed_bytes=inner.buffer())


@dataclass(frozen=True, slots=True)
class NestedProgram:
    """The method of a nested file.

    Attributes:
        method: What a call executes.
        inputs: How many inputs it takes.
    """

    method: LoadedMethod
    inputs: int


class ExecutorRuntime:
    """Executes the blobs of ``ExecutorBackend`` with a runner inside the runner.

    Args:
        depth: How many runners there are around this one already.
    """

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth

    def init(
        self,
        blob: memoryview,
        compile_specs: Sequence[StoredSpec],
        named_data: Mapping[str, memoryview],
    ) -> NestedProgram:
        """Return the method of a nested file.

        Args:
            blob: The bytes of the file.

        Returns:
            The handle that ``execute`` wants.

        Raises:
            ValueError: The file is damaged, has not just one method, or is nested too deep.
        """
        if self._depth >= DEEPEST:
            raise ValueError(f"the file holds files in files, more than {DEEPEST} deep")
        try:
            program = load(blob, backends={NAME: ExecutorRuntime(self._depth + 1)})
            names = list(program.methods)
            if len(names) != 1:
                raise ValueError(f"a nested file has one method, found {names}")
            method = program.method(names[0])
        except (RunnerError, FormatError) as error:
            raise ValueError(f"the nested file cannot be loaded: {error}") from error
        return NestedProgram(method, len(method.plan.inputs))

    def input_count(self, handle: NestedProgram) -> int:
        """Return how many inputs the nested method takes."""
        return handle.inputs

    def execute(self, handle: NestedProgram, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return what the nested method returns.

        Args:
            inputs: The inputs in order.

        Returns:
            New tensors, in order.

        Raises:
            ValueError: Another number of inputs is needed.
            RuntimeError: The nested method fails.
        """
        if len(inputs) != handle.inputs:
            raise ValueError(f"{handle.inputs} inputs are needed, found {len(inputs)}")
        try:
            return list(handle.method.run_flat(list(inputs)))
        except RunnerError as error:
            raise RuntimeError(f"the nested program: {error}") from error
