"""Errors of this package."""

from __future__ import annotations

from lowerdeck.inspect import ExitStatus


class LoweringError(RuntimeError):
    """Base of all errors of ``lowerdeck.lowered_module``.

    A ``RuntimeError``, like most of ExecuTorch's corresponding errors.

    Attributes:
        exit_status: The exit status of a command that fails with it.
    """

    exit_status: int = ExitStatus.BAD_INPUT


class BackendNotFoundError(LoweringError, NotImplementedError):
    """No backend of this name is registered, imported or installed."""

    exit_status: int = ExitStatus.USAGE


class AmbiguousBackendError(LoweringError):
    """Two different backends have the same name."""

    exit_status: int = ExitStatus.USAGE


class PartitionError(LoweringError):
    """A partitioner is invalid, failed, or broke its contract, such as by editing the graph."""


class PartitionerError(PartitionError, AssertionError):
    """A partitioner changed the graph, or returned no tags; an ``AssertionError``, as in exir."""


class OwnershipError(PartitionError):
    """A delegate cannot own a tensor that was tagged for it."""


class AliasingError(PartitionError):
    """Delegation would lose an in-place write, or the program cannot be functionalized."""


class PreprocessError(LoweringError):
    """A backend failed or returned an invalid result, or a partition cannot be sent to it."""

    exit_status: int = ExitStatus.FAILED


class SignatureError(LoweringError, ValueError):
    """Arguments or constants do not match the exported program's."""


class DelegateMappingError(LoweringError, ValueError):
    """An entry of a delegate debug map was rejected; the map is unchanged."""


class UnsupportedOperatorError(LoweringError, NotImplementedError):
    """A backend got an operator that it cannot compile."""


class CacheError(LoweringError, OSError):
    """A cache directory cannot be used."""

    exit_status: int = ExitStatus.FAILED


def in_a_line(error: BaseException) -> str:
    """Return the type and the first line of the message of an error."""
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
