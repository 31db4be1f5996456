"""Errors of this package.

Invalid *files* raise a subclass of :class:`FormatError`; *programs* that cannot be written raise
:class:`ProgramError`.
"""

from __future__ import annotations


class SerializerError(Exception):
    """Base of the errors of ``lowerdeck.serializer``."""


class ProgramError(SerializerError, ValueError):
    """A program cannot be written, an option is invalid, or stored bytes cannot be read."""


class TraceError(SerializerError, ValueError):
    """The trace of a call is malformed, or belongs to another program."""


class NamedDataConflictError(ProgramError):
    """A key was added twice with different contents."""

    def __init__(self, key: str, found: str, expected: str) -> None:
        self.key = key
        super().__init__(
            f"named data {key!r}: found {found} for a key that already holds {expected}; use "
            "another key, such as a hash of the bytes"
        )


class FormatError(SerializerError, ValueError):
    """A file is malformed, or its content is not safe to run.

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
    """The file identifier is not that of this format."""


class OffsetError(FormatError):
    """An offset, length, count or alignment does not fit the file, its header or a type."""


class MissingFieldError(FormatError):
    """A field that the runtime needs is absent."""


class LimitError(FormatError):
    """The file exceeds a documented limit."""


class SegmentError(FormatError):
    """A segment, or an offset into one, is outside of the file."""


class IndexRangeError(FormatError):
    """An index is out of range, or refers to a value of the wrong kind."""


class ContentError(FormatError):
    """The runtime would reject the content, crash on it, or compute wrong values."""
