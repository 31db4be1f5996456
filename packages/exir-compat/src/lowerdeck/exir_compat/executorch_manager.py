"""The program of a file, under the names by which exir's callers ask for its parts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

from torch.export import ExportedProgram

from lowerdeck.emitter import EmittedProgram
from lowerdeck.exir_compat.backend_config import ExecutorchBackendConfig
from lowerdeck.exir_compat.errors import UnknownMethodError
from lowerdeck.serializer import Program, external_data, write_ptd, write_pte


class ExecutorchProgramManager:
    """What the runtime runs, and the programs that it was made of.

    Args:
        execution_programs: The program of each method.
        emitted: What was emitted of them.
        backend_config: How the file is written.

    Attributes:
        emitted: What ``lowerdeck.emitter.emit`` returned: memory plans, sources of instructions.
    """

    def __init__(
        self,
        execution_programs: Mapping[str, ExportedProgram],
        emitted: EmittedProgram,
        backend_config: ExecutorchBackendConfig | None = None,
    ) -> None:
        self._programs = dict(execution_programs)
        self._options = (backend_config or ExecutorchBackendConfig()).file_options
        self.emitted: EmittedProgram = emitted

    @property
    def methods(self) -> set[str]:
        """The names of the methods that were exported."""
        return set(self._programs)

    @property
    def config_methods(self) -> set[str]:
        """The names of the methods that return constants."""
        return set(self.emitted.methods) - self.methods

    def exported_program(self, method_name: str = "forward") -> ExportedProgram:
        """Return the program that a method was emitted from.

        Args:
            method_name: The method.

        Raises:
            UnknownMethodError: There is none of that name.
        """
        if method_name not in self._programs:
            raise UnknownMethodError(
                f"there is no method {method_name!r}, but {', '.join(self._programs)}"
            )
        return self._programs[method_name]

    @property
    def executorch_program(self) -> Program:
        """The program as plain data, before it is written."""
        return self.emitted.program

    @cached_property
    def buffer(self) -> bytes:
        """The ``.pte`` file as bytes, made once; files are written without it."""
        return self.emitted.to_bytes(**self._options)

    @property
    def _emitter_output(self) -> SimpleNamespace:
        """What exir's own tools reach for under this name."""
        return SimpleNamespace(
            program=self.executorch_program,
            debug_handle_map=self.debug_handle_map,
            method_to_delegate_debug_id_map=self.delegate_map,
        )

    @property
    def debug_handle_map(self) -> dict[int, list[int]]:
        """The debug handles of each instruction, by its index; of the last method that has one."""
        found: dict[int, list[int]] = {}
        for sources in self.emitted.debug_handle_map.values():
            found |= {index: list(source.handles) for index, source in sources.items()}
        return found

    @property
    def delegate_map(self) -> dict[str, dict[int, dict[str, Any]]]:
        """What backends told of each delegate call, by method and index of its instruction."""
        return {
            method: {
                index: {"name": source.backend_id, "delegate_map": dict(source.debug_handle_map)}
                for index, source in calls.items()
            }
            for method, calls in self.emitted.delegate_debug_maps.items()
        }

    def write_to_file(self, open_file: BinaryIO) -> None:
        """Write the ``.pte`` file to a file that is open for bytes.

        Args:
            open_file: The file.
        """
        open_file.write(self.buffer)

    def write_tensor_data_to_file(self, outdir: str | os.PathLike[str]) -> None:
        """Write the ``.ptd`` files that belong to the program, straight from memory.

        Args:
            outdir: An existing folder.
        """
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
