"""Checks of paths and tags passed by callers."""

from __future__ import annotations

import os
from pathlib import Path

from lowerdeck.serializer.errors import ProgramError


def require_path(path_like: object, *, otherwise: str = "") -> Path:
    """Return the argument as a path.

    Args:
        path_like: The argument to check.
        otherwise: Other accepted arguments, for the error message.

    Raises:
        ProgramError: The argument is not a path, or contains a NUL character.
    """
    path = os.fspath(path_like) if isinstance(path_like, str | os.PathLike) else path_like
    if isinstance(path, bytes):
        raise ProgramError("found bytes, expected a path: decode it with os.fsdecode()")
    if not isinstance(path, str):
        more = f" {otherwise}" if otherwise else ""
        raise ProgramError(
            f"found a {type(path_like).__name__}, expected a path, as str or os.PathLike{more}"
        )
    if "\0" in path:
        raise ProgramError(f"found the path {path!r}, expected one without NUL characters")
    return Path(path)


def require_stem(tag: object) -> str:
    """Return the tag of external data, which is the stem of its file name.

    Raises:
        ProgramError: The tag is not a valid stem.
    """
    if not isinstance(tag, str) or not tag or "\0" in tag or Path(tag).name != tag:
        raise ProgramError(f"found the tag {tag!r}, expected the stem of a file name")
    return tag
