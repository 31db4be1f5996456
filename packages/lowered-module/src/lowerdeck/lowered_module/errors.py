"""The errors that this package raises."""

from __future__ import annotations

from lowerdeck.inspect import ExitStatus


class LoweringError(RuntimeError):
    """Base of every error that ``lowerdeck.lowered_module`` raises on purpose.

    A ``RuntimeError``, as most of what ExecuTorch raises in its place, so that callers who catch
    those go on.

    Attributes:
        exit_status: With what a command ends that raises it.
    """

    exit_status: int = ExitStatus.BAD_INPUT


class BackendNotFoundError(LoweringError, NotImplementedError):
    """No backend of the wanted name is registered, subclassed or installed."""

    exit_status: int = ExitStatus.USAGE


class AmbiguousBackendError(LoweringError):
    """Two different backends claim the same name."""

    exit_status: int = ExitStatus.USAGE


class PartitionError(LoweringError):
    """A partitioner broke its contract: an edited graph, a missing or an impossible tag."""


class PartitionerError(PartitionError, AssertionError):
    """A partitioner changed the graph, or returned no tags; exir asserts that it does not."""


class OwnershipError(PartitionError):
    """A delegate should own data that it cannot own."""


class AliasingError(PartitionError):
    """A cut would lose a write in place, and the program cannot be made functional."""


class PreprocessError(LoweringError):
    """A backend failed on one partition, or returned something else than a result."""

    exit_status: int = ExitStatus.FAILED


class SignatureError(LoweringError, ValueError):
    """A graph and the signature that should describe it do not fit each other."""


class DelegateMappingError(LoweringError, ValueError):
    """An entry of a delegate debug map was refused; the map is as it was before."""


class UnsupportedOperatorError(LoweringError, NotImplementedError):
    """A backend was given an operator that it cannot compile."""


class CacheError(LoweringError, OSError):
    """A directory for kept results cannot be used."""

    exit_status: int = ExitStatus.FAILED


def in_a_line(error: BaseException) -> str:
    """Return an error of others in one line."""
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
