"""Errors of this package."""

from __future__ import annotations

from collections.abc import Sequence

from lowerdeck.inspect import ExitStatus


class RunnerError(Exception):
    """Base of all errors of ``lowerdeck.runner``.

    Attributes:
        exit_status: Exit status of a command that fails with it.
    """

    exit_status: int = ExitStatus.BAD_INPUT


class ProgramError(RunnerError, ValueError):
    """A program cannot be loaded: it is malformed, or needs a feature that this runner lacks.

    Attributes:
        method: Name of the method at fault, or None for the file as a whole.
    """

    def __init__(self, message: str, *, method: str | None = None) -> None:
        super().__init__(f"method {method!r}: {message}" if method is not None else message)
        self.method = method


class MissingKernelError(ProgramError):
    """A program calls operators for which the runner has no kernel, or which are not allowed.

    Attributes:
        missing: Full names of the operators, such as ``mylib::gelu.out``.
    """

    exit_status: int = ExitStatus.FAILED

    def __init__(self, missing: Sequence[str], problem: str, *, method: str | None = None) -> None:
        super().__init__(problem, method=method)
        self.missing: tuple[str, ...] = tuple(missing)


class InputError(RunnerError, ValueError):
    """The inputs of a call do not fit the method.

    Attributes:
        argument: Name of the argument at fault, such as ``args[0]``; empty for their number.
    """

    def __init__(self, message: str, *, argument: str = "") -> None:
        super().__init__(message)
        self.argument = argument


class ExecutionError(RunnerError, RuntimeError):
    """An instruction failed at run time.

    Attributes:
        method: Name of the method.
        instruction: Index of the instruction in its chain, or -1 before the location is known.
        operator: The operator that it calls, such as ``aten::add.out``.
    """

    def __init__(
        self, message: str, *, method: str = "", instruction: int = -1, operator: str = ""
    ) -> None:
        where = f"method {method!r}, instruction {instruction} ({operator}): " if method else ""
        super().__init__(where + message)
        self.method = method
        self.instruction = instruction
        self.operator = operator


class BusyError(RunnerError, RuntimeError):
    """A program was used while one of its methods was running; nothing was changed."""

    exit_status: int = ExitStatus.FAILED


class MemoryPlanError(ExecutionError):
    """The memory plan assigns the same bytes to two values that are needed at the same time."""


class OfficialRuntimeError(RunnerError):
    """The official runtime is not installed, rejects a file or a call, or crashes."""

    exit_status: int = ExitStatus.FAILED
