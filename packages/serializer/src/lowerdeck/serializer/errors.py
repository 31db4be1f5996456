"""The errors that this package raises.

Whatever is wrong with a *file* is a :class:`FormatError`; its subclasses are the ways a file can
be wrong. Whatever is wrong with a *program* that should be written is a :class:`ProgramError`.
"""

from __future__ import annotations


class SerializerError(Exception):
    """Base of every error that ``lowerdeck.serializer`` raises on purpose."""


class ProgramError(SerializerError, ValueError):
    """The program or the options given to the writer cannot be written."""


class TraceError(SerializerError, ValueError):
    """A trace of a call is malformed, or of another program."""


class NamedDataConflictError(ProgramError):
    """One key was given two different contents."""

    def __init__(self, key: str, found: str, expected: str) -> None:
        self.key = key
        super().__init__(
            f"named data {key!r}: found {found} under a key that already holds {expected}; "
            "give different contents different keys (a hash of the bytes is a good one)"
        )


class TableLimitWarning(UserWarning):
    """The program that was written has more tables than the runtime's default check visits."""


class FormatError(SerializerError, ValueError):
    """A file is not a well-formed `.pte` or `.ptd`, or its content is not safe to run.

    Attributes:
        field: What was being read, such as ``"Tensor.sizes"``.
        offset: Byte offset in the file where it was read, or None where none can be named.
        reason: What was found and what was expected.
    """

    def __init__(self, reason: str, *, field: str, offset: int | None = None) -> None:
        self.reason = reason
        self.field = field
        self.offset = offset
        position = "" if offset is None else f" at byte {offset}"
        super().__init__(f"{field}{position}: {reason}")


class TruncatedError(FormatError):
    """The file ends before something that its header or tables say is there."""


class MagicError(FormatError):
    """The file identifier is not the one of this format."""


class HeaderError(FormatError):
    """The extended header contradicts itself or the file."""


class OffsetError(FormatError):
    """An offset, a length or a count leads outside the FlatBuffer."""


class AlignmentError(FormatError):
    """Something is at an address that its type does not allow."""


class TableError(FormatError):
    """The field map (vtable) of a table is malformed."""


class MissingFieldError(FormatError):
    """A field that the runtime needs is absent."""


class EnumError(FormatError):
    """A number is not a member of its enumeration or union."""


class TextError(FormatError):
    """A string is not UTF-8, or its terminating NUL is missing."""


class LimitError(FormatError):
    """The file asks for more than the documented limits allow."""


class SegmentError(FormatError):
    """A segment, or an offset into one, leads outside the file."""


class IndexRangeError(FormatError):
    """An index points at nothing, or at something of the wrong kind."""


class ContentError(FormatError):
    """The content is well-formed, but the runtime would refuse it, crash, or compute nonsense."""
