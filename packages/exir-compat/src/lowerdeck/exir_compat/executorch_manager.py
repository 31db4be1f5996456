"""The program of a file, under the names by which exir's callers ask for its parts."""

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
from lowerdeck.exir_compat.exir_schema import in_exirs_classes
from lowerdeck.serializer import (
    Program,
    external_data,
    write_ptd,
    write_pte,
)


class ExecutorchProgramManager(Manager):
    """What the runtime runs, and the programs that it was made of.

    Args:
        execution_programs: The program of each method.
        emitted: What was emitted of them.
        backend_config: How the file is written.

    Attributes:
        emitted: What ``lowerdeck.emitter.emit`` returned: memory plans, sources of instructions.
    """

    _exirs_name = "ExecutorchProgramManager"

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
        """The names of the methods that return constants."""
        return set(self.emitted.methods) - self.methods

    @cached_property
    def executorch_program(self) -> Program:
        """The program as plain data, before it is written; in exir's classes where imported."""
        program: Program = in_exirs_classes(self.emitted.program)
        return program

    @cached_property
    def buffer(self) -> bytes:
        """The ``.pte`` file as bytes, made once; files are written without it."""
        return self.emitted.to_bytes(**self._options)

    @cached_property
    def _emitter_output(self) -> EmitterOutput:
        """What exir's own tools reach for under this name."""
        return emitter_output(self.emitted, self.executorch_program)

    @property
    def debug_handle_map(self) -> dict[str, dict[int, int | list[int]]]:
        """The debug handle of each instruction, by method and index; of delegates lists."""
        return self._emitter_output.debug_handle_map

    @property
    def delegate_map(self) -> dict[str, dict[int, dict[str, Any]]]:
        """Debug maps of delegate calls, by method and index of the instruction."""
        return self._emitter_output.method_to_delegate_debug_id_map

    @property
    def instruction_id_to_num_outs_map(self) -> dict[str, dict[int, int]]:
        """How many results each delegate call gives, by method and index."""
        return self._emitter_output.instruction_id_to_num_outs_map

    def keep_record(self, record: Any) -> None:
        """Keep a record for ExecuTorch's devtools, with what was emitted added to it.

        Args:
            record: What was kept of the programs before; it is not changed.
        """
        self._etrecord = record.copy()
        self._etrecord.add_executorch_program(self)

    def get_etrecord(self) -> Any:
        """Return the record that ``generate_etrecord=True`` asked for, an ``ETRecord``.

        Raises:
            SettingError: None was requested.
        """
        if self._etrecord is None:
            raise SettingError(
                "ETRecord was not generated: give generate_etrecord=True to to_edge or "
                "to_edge_transform_and_lower, or both managers to executorch.devtools' "
                "generate_etrecord"
            )
        return self._etrecord

    def dump_executorch_program(self, verbose: bool = False, out: TextIO | None = None) -> None:  # noqa: ARG002
        """Print the program.

        Args:
            verbose: Changes nothing: every value and instruction is printed.
            out: Where to; standard output if None.
        """
        print(self.executorch_program, file=out)

    def write_to_file(self, open_file: BinaryIO) -> None:
        """Write the ``.pte`` file to a file that is open for bytes."""
        open_file.write(self.buffer)

    def write_tensor_data_to_file(self, outdir: str | os.PathLike[str]) -> None:
        """Write the ``.ptd`` files that belong to the program, straight from memory."""
        named = self.emitted.named_data.get_named_data_store_output()
        for stem, data in external_data(named).items():
            write_ptd(data, Path(outdir) / f"{stem.removesuffix('.ptd')}.ptd")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the ``.pte`` file, straight from the tensors' memory.

        As in exir the ``.ptd`` files are written by :meth:`write_tensor_data_to_file`.

        Args:
            path: Where; it must end in ``.pte``.

        Raises:
            ValueError: It does not.
            OSError: It cannot be written.
        """
        if not os.fspath(path).endswith(".pte"):
            raise ValueError(f"found path {os.fspath(path)!r}, expected one that ends in .pte")
        named = self.emitted.named_data.get_named_data_store_output()
        write_pte(self.emitted.program, path, named_data=named, **self._options)
