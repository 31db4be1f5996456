"""Errors of this package."""

from __future__ import annotations

from collections.abc import Sequence

from lowerdeck.inspect import ExitStatus


class RunnerError(Exception):
    """Base of all errors of ``lowerdeck.runner``.

    Attributes:
        exit_status: Exit status of commands that fail with it.
    """

    exit_status: int = ExitStatus.BAD_INPUT


class ProgramError(RunnerError, ValueError):
    """A program cannot be loaded: it is malformed, or needs a feature that this runner lacks.

    Attributes:
        method: Name of the faulty method; None if the error is not in one method.
    """

    def __init__(self, message: str, *, method: str | None = None) -> None:
        super().__init__(f"method {method!r}: {message}" if method is not None else message)
        self.method = method


class MissingKernelError(ProgramError):
    """A program calls operators that have no kernel here, or are not allowed.

    Attributes:
        missing: Full names of the operators, such as ``mylib::gelu.out``.
    """

    exit_status: int = ExitStatus.FAILED

    def __init__(self, missing: Sequence[str], problem: str, *, method: str | None = None) -> None:
        super().__init__(problem, method=method)
        self.missing: tuple[str, ...] = tuple(missing)


class InputError(RunnerError, ValueError):
    """The inputs of a call do not match the method.

    Attributes:
        argument: Name of the wrong argument, such as ``args[0]``; empty if the error is not about
            one argument.
    """

    def __init__(self, message: str, *, argument: str = "") -> None:
        super().__init__(message)
        self.argument = argument


class ExecutionError(RunnerError, RuntimeError):
    """An instruction failed at run time.

    Attributes:
        instruction: Index in its chain, or -1 if unknown.
        operator: The called operator, such as ``aten::add.out``.
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
    """A program was used while another call of it was in progress; the call had no effect."""

    exit_status: int = ExitStatus.FAILED


class MemoryPlanError(ExecutionError):
    """The memory plan is invalid, conflicts with another method's, or is too large to check."""


class OfficialRuntimeError(RunnerError):
    """The official runtime is missing, rejects a file or a call, crashes, or does not respond."""

    exit_status: int = ExitStatus.FAILED
