"""The result of an emission."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lowerdeck import serializer
from lowerdeck.emitter.backend.debug_map import DelegateSource, InstructionSource
from lowerdeck.serializer import NamedDataStore, Program, serialize_pte


@dataclass(frozen=True, slots=True, repr=False)
class EmittedProgram:
    """A program for the runtime, with debug maps for tools.

    Attributes:
        program: The program as plain data; constants are views of the tensors' memory.
        debug_handle_map: For each method, the source of each instruction, by its index.
        delegate_debug_maps: For each method, the debug map of each delegate call, by the index of
            its instruction.
        named_data: The blobs that backends look up by key at run time.
    """

    program: Program
    debug_handle_map: dict[str, dict[int, InstructionSource]] = field(default_factory=dict)
    delegate_debug_maps: dict[str, dict[int, DelegateSource]] = field(default_factory=dict)
    named_data: NamedDataStore = field(default_factory=NamedDataStore)

    def __repr__(self) -> str:
        """Return the methods with their instruction counts."""
        methods_shown = [
            f"{plan.name}: {sum(len(chain.instructions) for chain in plan.chains)} instructions"
            for plan in self.program.execution_plan
        ]
        return f"<EmittedProgram {', '.join(methods_shown)}>"

    @property
    def methods(self) -> tuple[str, ...]:
        """The names of the methods, in file order."""
        return tuple(plan.name for plan in self.program.execution_plan)

    @property
    def buffer(self) -> bytes:
        """The `.pte` file as bytes, serialized at each access; an alias of :meth:`to_bytes`."""
        return self.to_bytes()

    def to_bytes(self, **options: Any) -> bytes:
        """Return the `.pte` file as bytes.

        Args:
            **options: The layout options of :func:`lowerdeck.serializer.serialize_pte`.
        """
        named = self.named_data.get_named_data_store_output()
        return serialize_pte(self.program, named_data=named, **options)

    def external_files(self) -> dict[str, bytes]:
        """Return the `.ptd` files that belong to the program, by their stems."""
        named = self.named_data.get_named_data_store_output()
        files = serializer.external_data(named)
        return {tag: serializer.serialize_ptd(data) for tag, data in files.items()}

    def save(self, path: str | os.PathLike[str], **options: Any) -> int:
        """Write the `.pte` file and its `.ptd` files, without copying weights.

        After a crash the folder has the old files, the new files, or no `.pte` file, but never a
        `.pte` with mismatched data files.

        Args:
            path: Path of the program.
            **options: The layout options of :func:`lowerdeck.serializer.write_model`.

        Returns:
            The size of the `.pte` file in bytes.

        Raises:
            ProgramError: Something cannot be written; nothing was changed.
            OSError: A file cannot be written; the old ones are unchanged.
        """
        named = self.named_data.get_named_data_store_output()
        if not serializer.external_data(named):
            # The path may be a device or a pipe, which has no folder for data files.
            return serializer.write_pte(self.program, path, named_data=named, **options)
        serializer.write_model(self.program, path, named_data=named, **options)
        return Path(path).stat().st_size
