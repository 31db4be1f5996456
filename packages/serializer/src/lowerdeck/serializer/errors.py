"""Errors of this package.

Faults of a *file* raise a subclass of :class:`FormatError`; faults of a *program* to be written
raise :class:`ProgramError`.
"""

from __future__ import annotations


class SerializerError(Exception):
    """Base of all errors of ``lowerdeck.serializer``."""


class ProgramError(SerializerError, ValueError):
    """The program or an option cannot be written."""


class TraceError(SerializerError, ValueError):
    """The trace of a call is malformed, or belongs to another program."""


class NamedDataConflictError(ProgramError):
    """One key has two different contents."""

    def __init__(self, key: str, found: str, expected: str) -> None:
        self.key = key
        super().__init__(
            f"named data {key!r}: found {found} under a key that already holds {expected}; "
            "give different contents different keys (a hash of the bytes is a good one)"
        )


class TableLimitWarning(UserWarning):
    """The written program has more tables than the runtime's default check visits."""


class FormatError(SerializerError, ValueError):
    """A file is not a well-formed `.pte` or `.ptd`, or its content is not safe to run.

    Attributes:
        field: The field that was read, such as ``"Tensor.sizes"``.
        offset: Byte offset in the file, or None if unknown.
        reason: What was found and what was expected.
    """

    def __init__(self, reason: str, *, field: str, offset: int | None = None) -> None:
        self.reason = reason
        self.field = field
        self.offset = offset
        position = "" if offset is None else f" at byte {offset}"
        super().__init__(f"{field}{position}: {reason}")


class TruncatedError(FormatError):
    """The file ends before data that its header or tables refer to."""


class MagicError(FormatError):
    """The file identifier is not the one of this format."""


class OffsetError(FormatError):
    """An offset, a length, a count or an address does not fit the file, its header or a type."""


class MissingFieldError(FormatError):
    """A field that the runtime needs is absent."""


class LimitError(FormatError):
    """The file asks for more than the documented limits allow."""


class SegmentError(FormatError):
    """A segment, or an offset into one, is outside of the file."""


class IndexRangeError(FormatError):
    """An index is out of range, or refers to a value of another kind."""


class ContentError(FormatError):
    """The runtime would reject the content, crash on it, or compute garbage."""
