"""Serialized partitions for compilation in another process."""

from __future__ import annotations

import io
from typing import Any, NamedTuple

import torch
from torch.export import ExportedProgram

from lowerdeck.lowered_module.authoring.backend import PreprocessResult, with_plain_bytes
from lowerdeck.lowered_module.errors import PreprocessError
from lowerdeck.lowered_module.program.pickling import dump_program, load_program


class Task(NamedTuple):
    """A serialized partition.

    Attributes:
        program: The partition, which refers to its tensors by number.
        tensors: The list of these tensors, written by ``torch.save``.
        backend: The backend class; the other process must be able to import it.
        compile_specs: The compile specs of the partition.
    """

    program: bytes
    tensors: bytes
    backend: Any
    compile_specs: list[Any]

    @classmethod
    def of(cls, program: ExportedProgram, backend: Any, compile_specs: list[Any]) -> Task:
        """Return the task of compiling ``program``.

        Raises:
            PreprocessError: The program contains an object that cannot be pickled.
        """
        tensors: list[torch.Tensor] = []
        try:
            content = dump_program(program, tensors)
            stream = io.BytesIO()
            torch.save(tensors, stream)
        except Exception as error:
            raise PreprocessError(
                f"a partition cannot be sent to an executor ({type(error).__name__}: {error}): "
                "lower without an executor"
            ) from error
        return cls(content, stream.getvalue(), backend, compile_specs)

    def run(self) -> PreprocessResult:
        """Return the backend's result; called in the other process.

        Raises:
            PreprocessError: The program or its weights cannot be deserialized in this process.
            Exception: Raised by the backend.
        """
        try:
            tensors = torch.load(io.BytesIO(self.tensors), weights_only=True)
            program = load_program(self.program, tensors)
        except Exception as error:
            raise PreprocessError(
                f"a worker cannot deserialise a partition ({type(error).__name__}: {error}): use "
                "the same torch version in both processes, or lower without an executor"
            ) from error
        return with_plain_bytes(self.backend.preprocess(program, self.compile_specs))
