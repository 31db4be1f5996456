"""Write and read a program together with its external data."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Unpack

from lowerdeck.serializer.errors import ContentError, ProgramError
from lowerdeck.serializer.flatbuffer.stream import write_files
from lowerdeck.serializer.ptd.external_read import PtdFile, open_ptd
from lowerdeck.serializer.ptd.external_write import ExternalEntry, external_data, ptd_pieces
from lowerdeck.serializer.pte.enums import TensorDataLocation
from lowerdeck.serializer.pte.layout import LayoutOptions
from lowerdeck.serializer.pte.named_data import NamedDataStoreOutput, TensorLayout
from lowerdeck.serializer.pte.read import Closing, PteFile, open_pte
from lowerdeck.serializer.pte.schema import Program, Tensor
from lowerdeck.serializer.pte.write import pte_pieces


def write_model(
    program: Program,
    path: str | os.PathLike[str],
    *,
    named_data: NamedDataStoreOutput | None = None,
    **layout: Unpack[LayoutOptions],
) -> list[Path]:
    """Write a program and its external data side by side, and return the paths of all files.

    Named data with the tag ``weights`` go to ``weights.ptd`` in the folder of ``path``. All files
    are planned and checked first, then written under temporary names, then renamed. The old
    program is removed before its data, and the new one is placed last: after a crash the folder
    has the old model, the new one, or no program.

    Args:
        path: Path of the `.pte` file.
        named_data: Named data, such as those of backends.
        **layout: As for :func:`serialize_pte`.

    Returns:
        The paths of the `.ptd` files, then that of the `.pte`.

    Raises:
        ProgramError: An argument is invalid, or the data do not match the program.
        OSError: A file cannot be written.
    """
    path = Path(path)
    program_pieces = pte_pieces(program, named_data, layout)
    data = external_data(named_data) if named_data else {}
    inside = [entry.key for entry in program.named_data]
    inside += named_data.pte_data if named_data else ()
    problem = _mismatch(program, {tag: contents.entries for tag, contents in data.items()}, inside)
    if problem:
        raise ProgramError(problem)
    for tag in data:
        if not tag or Path(tag).name != tag:
            raise ProgramError(f"found the tag {tag!r}, expected the stem of a file name")
    files = [(ptd_pieces(contents), path.parent / f"{tag}.ptd") for tag, contents in data.items()]
    # The program comes last, so that its data exists first.
    write_files([*files, (program_pieces, path)])
    return [*(target for _, target in files), path]


@dataclass
class OpenModel(Closing):
    """A memory-mapped program with its external data.

    Attributes:
        entries: All external entries by key.
    """

    program_file: PteFile
    data_files: list[PtdFile]
    entries: dict[str, ExternalEntry] = field(default_factory=dict)

    def close(self) -> None:
        """Close all files."""
        self.program_file.close()
        for file in self.data_files:
            file.close()


def open_model(
    path: str | os.PathLike[str], data_paths: Iterable[str | os.PathLike[str]]
) -> OpenModel:
    """Open a program with its external data and check that they match.

    Returns:
        The open files; use them in a ``with`` block.

    Raises:
        FormatError: A file is malformed, or the data do not match the program.
        OSError: A file cannot be opened.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(open_ptd(data_path)) for data_path in data_paths]
        program_file = stack.enter_context(open_pte(path))
        by_file = {str(number): file.entries for number, file in enumerate(files)}
        inside = [entry.key for entry in program_file.named_data]
        problem = _mismatch(program_file.program(), by_file, inside)
        if problem:
            raise ContentError(problem, field="external data")
        stack.pop_all()
    entries = {key: entry for file in files for key, entry in file.entries.items()}
    return OpenModel(program_file, files, entries)


def _mismatch(
    program: Program, files: Mapping[str, Mapping[str, ExternalEntry]], inside: Iterable[str]
) -> str:
    """Return why the runtime would reject these data for this program, or ``""``."""
    entries: dict[str, ExternalEntry] = {}
    program_keys = set(inside)
    for file_entries in files.values():
        for key, entry in file_entries.items():
            if key in entries or key in program_keys:
                return f"found the key {key!r} twice; the runtime rejects duplicates"
            entries[key] = entry
    for plan in program.execution_plan:
        for index, value in enumerate(plan.values):
            if isinstance(value.val, Tensor):
                problem = _tensor_mismatch(value.val, entries)
                if problem:
                    return f"method {plan.name!r}.values[{index}]: {problem}"
    return ""


def _tensor_mismatch(tensor: Tensor, entries: Mapping[str, ExternalEntry]) -> str:
    extra = tensor.extra_tensor_info
    if extra is None or extra.location is not TensorDataLocation.EXTERNAL:
        return ""
    entry = entries.get(extra.fully_qualified_name or "")
    if entry is None:
        return f"found no external data for {extra.fully_qualified_name!r}"
    expected = TensorLayout(tensor.scalar_type, tensor.sizes, tensor.dim_order)
    if entry.tensor_layout != expected:
        return (
            f"found {entry.tensor_layout} for {extra.fully_qualified_name!r}, expected {expected}"
        )
    return ""
