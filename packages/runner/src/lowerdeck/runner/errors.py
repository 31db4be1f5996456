"""The errors that this package raises."""

from __future__ import annotations


class RunnerError(Exception):
    """Base of every error that ``lowerdeck.runner`` raises on purpose."""


class ProgramError(RunnerError, ValueError):
    """A program cannot be loaded: it is malformed, or needs what this runner does not have.

    Attributes:
        method: Name of the method at fault, or None when the file as a whole is.
    """

    def __init__(self, message: str, *, method: str | None = None) -> None:
        super().__init__(f"method {method!r}: {message}" if method is not None else message)
        self.method = method


class InputError(RunnerError, ValueError):
    """The inputs of a call do not fit the method.

    Attributes:
        argument: Name of the argument at fault, such as ``args[0]``; empty for their number.
    """

    def __init__(self, message: str, *, argument: str = "") -> None:
        super().__init__(message)
        self.argument = argument


class ExecutionError(RunnerError, RuntimeError):
    """An instruction failed while a method ran.

    Attributes:
        method: Name of the method.
        instruction: Index of the instruction in its chain, or -1 before the location is known.
        operator: What the instruction calls, such as ``aten::add.out``.
    """

    def __init__(
        self, message: str, *, method: str = "", instruction: int = -1, operator: str = ""
    ) -> None:
        place = f"method {method!r}, instruction {instruction} ({operator}): " if method else ""
        super().__init__(place + message)
        self.method = method
        self.instruction = instruction
        self.operator = operator


class MemoryPlanError(ExecutionError):
    """The memory plan gives two values the same bytes while both are needed."""
