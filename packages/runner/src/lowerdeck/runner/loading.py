"""Loading a program from a file, from bytes, or from the serializer's own classes."""

from __future__ import annotations

from collections.abc import Mapping

from lowerdeck.runner.delegates import BackendRuntime
from lowerdeck.runner.program import LoadedProgram
from lowerdeck.serializer import Program


def load(
    program: Program,
    *,
    backends: Mapping[str, BackendRuntime] | None = None,
) -> LoadedProgram:
    """Return a program ready to run.

    Args:
        program: A program in memory, such as the emitter's ``EmittedProgram.program``.
        backends: Runtime halves of backends by id, before the installed ones.

    Raises:
        ProgramError: A method is listed twice.
    """
    return LoadedProgram(program, external={}, backends=backends or {})
