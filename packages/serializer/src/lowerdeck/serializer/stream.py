"""Pieces of a file written one after the other, so that a crash leaves the old file or the new."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, TypeAlias

Piece: TypeAlias = bytes | bytearray | memoryview

_CHUNK = 1 << 24


def write_pieces(pieces: Iterable[Piece], path_or_file: str | os.PathLike[str] | BinaryIO) -> int:
    """Write pieces to a path or an open file and return how many bytes they were.

    A path is written under a temporary name in the same folder, flushed to the disk, and renamed.

    Args:
        pieces: The bytes in order.
        path_or_file: Where to write.

    Raises:
        OSError: The file cannot be written; the old one is as it was.
    """
    if not isinstance(path_or_file, str | os.PathLike):
        return _write(pieces, path_or_file)
    return write_files([(pieces, Path(path_or_file))])


def write_files(files: Iterable[tuple[Iterable[Piece], Path]]) -> int:
    """Write several files that belong together, and return how many bytes they were.

    All are written under temporary names and flushed to the disk before the first is renamed.

    Args:
        files: The pieces and the path of each, in the order of renaming.

    Raises:
        OSError: A file cannot be written; the old ones are as they were.
    """
    written = 0
    made: list[tuple[str, Path]] = []
    try:
        for pieces, path in files:
            handle, name = _new_file(path)
            made.append((name, path))
            with os.fdopen(handle, "wb", buffering=0) as file:
                written += _write(pieces, file)
                with suppress(FileNotFoundError):
                    os.fchmod(file.fileno(), path.stat().st_mode & 0o7777)
                os.fsync(file.fileno())
        for name, path in made:
            os.replace(name, path)  # noqa: PTH105  (Path.replace would only wrap this)
    except BaseException:
        for name, _ in made:
            with suppress(OSError):
                os.unlink(name)  # noqa: PTH108
        raise
    return written


def _write(pieces: Iterable[Piece], file: BinaryIO) -> int:
    total = 0
    for piece in pieces:
        view = memoryview(piece)
        # One call may write less than it was given, and most systems stop at 2 GiB.
        while view:
            done = file.write(view[:_CHUNK])
            total += done
            view = view[done:]
    return total


def _new_file(path: Path) -> tuple[int, str]:
    """Create a file of an unused name beside ``path``; the module tempfile is slow to import."""
    while True:
        name = str(path.with_name(f".{path.name}.{os.urandom(6).hex()}.tmp"))
        with suppress(FileExistsError):
            try:
                return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), name
            except FileNotFoundError as error:
                # The name is ours; what is missing is the folder that the caller named.
                raise FileNotFoundError(error.errno, error.strerror, str(path.parent)) from None
