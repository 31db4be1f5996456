"""Checks of paths and tags that callers give."""

from __future__ import annotations

import os
from pathlib import Path

from lowerdeck.serializer.errors import ProgramError


def require_path(path_like: object, *, otherwise: str = "") -> Path:
    """Return a path, or raise an error that names the type found.

    Args:
        path_like: The argument to check.
        otherwise: What else the caller takes, such as ``"or a file opened for writing bytes"``.

    Raises:
        ProgramError: It is not a path, or not one that a file can have.
    """
    path = os.fspath(path_like) if isinstance(path_like, str | os.PathLike) else path_like
    if isinstance(path, bytes):
        raise ProgramError("found bytes, expected a path: give os.fsdecode() of them")
    if not isinstance(path, str):
        more = f" {otherwise}" if otherwise else ""
        raise ProgramError(
            f"found a {type(path_like).__name__}, expected a path, as str or os.PathLike{more}"
        )
    if "\0" in path:
        raise ProgramError(f"found the path {path!r}, expected one without the character NUL")
    return Path(path)


def require_stem(tag: object) -> str:
    """Return the tag of external data, which names the file that they go to.

    Raises:
        ProgramError: It is not the stem of a file name.
    """
    if not isinstance(tag, str) or not tag or "\0" in tag or Path(tag).name != tag:
        raise ProgramError(f"found the tag {tag!r}, expected the stem of a file name")
    return tag
