"""Manager of an emitted program."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from torch.export import ExportedProgram

from lowerdeck.emitter import EmittedProgram
from lowerdeck.exir_compat.backend_config import ExecutorchBackendConfig, file_options
from lowerdeck.exir_compat.emitting import EmitterOutput, emitter_output
from lowerdeck.exir_compat.errors import SettingError
from lowerdeck.exir_compat.exir_classes import Manager
from lowerdeck.exir_compat.exir_schema import to_exir_classes
from lowerdeck.serializer import Program, external_data, write_ptd, write_pte


class ExecutorchProgramManager(Manager):
    """The emitted program and the lowered programs that it was emitted from.

    Args:
        execution_programs: Lowered program of each method.
        emitted: Result of the emission.
        backend_config: Settings of the file.

    Attributes:
        emitted: Result of ``lowerdeck.emitter.emit``, with memory plans and instruction sources.
    """

    _exir_name = "ExecutorchProgramManager"

    def __init__(
        self,
        execution_programs: Mapping[str, ExportedProgram],
        emitted: EmittedProgram,
        backend_config: ExecutorchBackendConfig | None = None,
    ) -> None:
        self._programs = dict(execution_programs)
        self._options = file_options(backend_config or ExecutorchBackendConfig())
        self._etrecord: Any = None
        self.emitted: EmittedProgram = emitted

    @property
    def config_methods(self) -> set[str]:
        """Names of constant methods."""
        return set(self.emitted.methods) - self.methods

    @cached_property
    def executorch_program(self) -> Program:
        """The program as plain data, in exir's classes if exir is imported."""
        program: Program = to_exir_classes(self.emitted.program)
        return program

    @cached_property
    def buffer(self) -> bytes:
        """The cached bytes of the ``.pte`` file; ``save`` does not use them."""
        return self.emitted.to_bytes(**self._options)

    @cached_property
    def _emitter_output(self) -> EmitterOutput:
        """Emission result, under the name that exir's tools read."""
        return emitter_output(self.emitted, self.executorch_program)

    @property
    def debug_handle_map(self) -> dict[str, dict[int, int | list[int]]]:
        """Debug handle of each instruction, by method and index; a list for a delegate call."""
        return self._emitter_output.debug_handle_map

    @property
    def delegate_map(self) -> dict[str, dict[int, dict[str, Any]]]:
        """Debug maps of delegate calls, by method and instruction index."""
        return self._emitter_output.method_to_delegate_debug_id_map

    @property
    def instruction_id_to_num_outs_map(self) -> dict[str, dict[int, int]]:
        """Number of results of delegate calls, by method and instruction index."""
        return self._emitter_output.instruction_id_to_num_outs_map

    def keep_record(self, record: Any) -> None:
        """Add the emitted program to a copy of a record for ExecuTorch's devtools.

        Args:
            record: Record of the programs before emission; not changed.
        """
        self._etrecord = record.copy()
        self._etrecord.add_executorch_program(self)

    def get_etrecord(self) -> Any:
        """Return the ``ETRecord`` that ``generate_etrecord=True`` requested.

        Raises:
            SettingError: No record was requested.
        """
        if self._etrecord is None:
            raise SettingError(
                "ETRecord was not generated: pass generate_etrecord=True to to_edge or "
                "to_edge_transform_and_lower, or pass both managers to executorch.devtools' "
                "generate_etrecord"
            )
        return self._etrecord

    def dump_executorch_program(self, verbose: bool = False, out: TextIO | None = None) -> None:  # noqa: ARG002
        """Print the program.

        Args:
            verbose: Ignored: all values and instructions are printed.
            out: Output stream; standard output by default.
        """
        print(self.executorch_program, file=out)

    def write_to_file(self, open_file: BinaryIO) -> None:
        """Write the ``.pte`` file to an open binary file."""
        open_file.write(self.buffer)

    def write_tensor_data_to_file(self, outdir: str | os.PathLike[str]) -> None:
        """Write the program's ``.ptd`` files without a copy in memory."""
        named = self.emitted.named_data.get_named_data_store_output()
        for stem, data in external_data(named).items():
            write_ptd(data, Path(outdir) / f"{stem.removesuffix('.ptd')}.ptd")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the ``.pte`` file without a copy in memory.

        As in exir, ``.ptd`` files are written by :meth:`write_tensor_data_to_file`.

        Args:
            path: Must end in ``.pte``.

        Raises:
            ValueError: ``path`` does not end in ``.pte``.
            OSError: The file cannot be written.
        """
        if not os.fspath(path).endswith(".pte"):
            raise ValueError(f"found path {os.fspath(path)!r}; expected one that ends in .pte")
        named = self.emitted.named_data.get_named_data_store_output()
        write_pte(self.emitted.program, path, named_data=named, **self._options)
