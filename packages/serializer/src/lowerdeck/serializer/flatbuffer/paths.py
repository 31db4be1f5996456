"""Checks of paths and tags that callers give."""

from __future__ import annotations

import os
from pathlib import Path

from lowerdeck.serializer.errors import ProgramError


def require_path(given: object, *, otherwise: str = "") -> Path:
    """Return a path, or say what was given in its place.

    Args:
        given: What should be a path.
        otherwise: What else the caller takes, such as ``"or a file opened for writing bytes"``.

    Raises:
        ProgramError: It is no path, or none that a file can have.
    """
    path = os.fspath(given) if isinstance(given, str | os.PathLike) else given
    if isinstance(path, bytes):
        raise ProgramError("found bytes, expected a path: give os.fsdecode() of them")
    if not isinstance(path, str):
        more = f" {otherwise}" if otherwise else ""
        raise ProgramError(
            f"found a {type(given).__name__}, expected a path, as str or os.PathLike{more}"
        )
    if "\0" in path:
        raise ProgramError(f"found the path {path!r}, expected one without the character NUL")
    return Path(path)


def require_stem(tag: object) -> str:
    """Return the tag of external data, which names the file that they go to.

    Raises:
        ProgramError: It is no stem of a file's name.
    """
    if not isinstance(tag, str) or not tag or "\0" in tag or Path(tag).name != tag:
        raise ProgramError(f"found the tag {tag!r}, expected the stem of a file name")
    return tag
