"""Bytes that are referred to and never copied: buffers, and ranges of files."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike


@dataclass(frozen=True, slots=True)
class FileRange:
    """A run of bytes in another file, read only when it is written out.

    Attributes:
        path: The file.
        offset: First byte.
        length: Number of bytes.
    """

    path: str | PathLike[str]
    offset: int
    length: int
