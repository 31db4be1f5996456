"""Load a program from a file, bytes or a ``serializer.Program``."""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import get_args

from lowerdeck.runner.debug_info import DebugMaps
from lowerdeck.runner.delegates import BackendRuntime
from lowerdeck.runner.errors import ProgramError
from lowerdeck.runner.method import Memory
from lowerdeck.runner.program import LoadedProgram
from lowerdeck.runner.values.sources import ExternalTensor, as_view
from lowerdeck.serializer import (
    FileRange,
    Hazard,
    MagicError,
    Program,
    SerializerError,
    deserialize_ptd,
    verify_pte,
)

ReadableBuffer = bytes | bytearray | memoryview
"""The bytes of a file."""
Source = str | os.PathLike[str] | ReadableBuffer | Program
"""A program: the path or bytes of a file, or a ``serializer.Program``."""
Beside = str | os.PathLike[str] | ReadableBuffer | Mapping[str, ReadableBuffer] | None
"""The ``.ptd`` of a program: its path, its bytes, or the bytes of each tensor by name."""


def load(
    program: Source,
    *,
    data: Beside = None,
    backends: Mapping[str, BackendRuntime] | None = None,
    memory: Memory = "strict",
    debug: DebugMaps | None = None,
    custom_kernels: Collection[str] = (),
) -> LoadedProgram:
    """Return a program ready to run.

    Files are verified and memory-mapped; constants are not copied.

    Args:
        program: The path of a ``.pte``, its bytes, or a program in memory.
        data: Its ``.ptd`` file (path or bytes), or the bytes of external tensors by name.
        backends: Runtimes by backend id; they take precedence over installed ones.
        memory: ``"strict"`` checks the memory plan when a method is loaded: no instruction may
            overwrite a value that is live, also across calls and loop iterations. Aliases
            (reshapes and slices that share memory) are not marked in a file, so a plan that moves
            an alias or its base may pass. ``"poison"`` also fills dead memory with 0xFF, so that
            reading it gives NaN. ``"unchecked"`` skips the check.
        debug: Debug maps of instructions, such as the emitter's ``EmittedProgram``.
        custom_kernels: Full names of operators that the program may call in addition to the
            ExecuTorch runtime's, such as ``{"mylib::fused_gelu.out"}``; import the library that
            registers them with torch.

    Raises:
        ProgramError: The program or its ``.ptd`` is malformed, or ``program`` has the wrong type.
        MemoryPlanError: The offsets of shared state conflict between methods.
        OSError: A file cannot be read.
        ValueError: ``memory`` is not one of the three values.

    Example:
        >>> from lowerdeck.serializer import ExecutionPlan, Program
        >>> load(Program(execution_plan=[ExecutionPlan("forward")])).methods
        ['forward']
    """
    if memory not in get_args(Memory):
        raise ValueError(f"memory is {memory!r}; expected one of {get_args(Memory)}")
    return LoadedProgram(
        program if isinstance(program, Program) else _read(program),
        external=_external(data),
        backends=backends or {},
        memory=memory,
        debug=debug,
        custom_kernels=custom_kernels,
    )


def _read(source: str | os.PathLike[str] | ReadableBuffer) -> Program:
    if not isinstance(source, str | os.PathLike | bytes | bytearray | memoryview | mmap.mmap):
        cure = ": pass its .to_bytes()" if hasattr(source, "to_bytes") else ""
        raise ProgramError(
            f"found a {type(source).__name__}, expected the path of a .pte, its bytes or a "
            f"serializer.Program{cure}"
        )
    name = os.fspath(source) if isinstance(source, str | os.PathLike) else "the program"
    hazards: list[Hazard] = []
    try:
        verified = verify_pte(_mapped(source), on_hazard=hazards.append)
    except SerializerError as error:
        verdict = "is not a .pte file" if isinstance(error, MagicError) else "cannot be used"
        raise ProgramError(f"{name} {verdict}: {error}") from error
    for hazard in hazards:
        if hazard.release:
            warnings.warn(f"{name} {hazard.reason}", stacklevel=3)
    return verified


def _mapped(source: str | os.PathLike[str] | ReadableBuffer) -> ReadableBuffer:
    """Return a file's mapped bytes; views keep the mapping alive."""
    if not isinstance(source, (str, os.PathLike)):
        return source
    return FileRange(source, 0, Path(source).stat().st_size).map()


def _external(data: Beside) -> dict[str, ExternalTensor]:
    if data is None:
        return {}
    if isinstance(data, Mapping):
        return {key: ExternalTensor(as_view(value)) for key, value in data.items()}
    name = f" {os.fspath(data)}" if isinstance(data, str | os.PathLike) else ""
    try:
        entries = deserialize_ptd(_mapped(data)).entries
    except SerializerError as error:
        raise ProgramError(f"the external data{name} cannot be used: {error}") from error
    return {
        key: ExternalTensor(as_view(entry.data), entry.tensor_layout, from_file=True)
        for key, entry in entries.items()
    }
