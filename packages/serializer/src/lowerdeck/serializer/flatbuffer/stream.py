"""Write files piece by piece and atomically."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from io import TextIOBase
from pathlib import Path
from typing import BinaryIO, TypeAlias

from lowerdeck.serializer.errors import ProgramError

Piece: TypeAlias = bytes | bytearray | memoryview

_CHUNK = 1 << 24


def write_pieces(pieces: Iterable[Piece], path_or_file: str | os.PathLike[str] | BinaryIO) -> int:
    """Write pieces to a path or an open file and return the number of bytes.

    A regular or new file is written as a temporary file in the same folder, flushed to disk and
    renamed. For a symbolic link the target is replaced. Devices and pipes are written directly.

    Args:
        pieces: The bytes in order.

    Raises:
        ProgramError: The target is neither a path nor a file, or the file was opened for text.
        OSError: The file cannot be written; an existing file at a path is unchanged.
    """
    if isinstance(path_or_file, str | os.PathLike):
        return write_files([(pieces, Path(path_or_file))])
    if isinstance(path_or_file, TextIOBase) or not hasattr(path_or_file, "write"):
        raise ProgramError(
            f"found a {type(path_or_file).__name__}, expected a path or a file opened with mode "
            "'wb'"
        )
    return _write(pieces, path_or_file)


def write_files(files: Iterable[tuple[Iterable[Piece], Path]]) -> int:
    """Write several files, and return their total size in bytes.

    All are written under temporary names and flushed to disk before the first is renamed. The last
    file refers to the others: it is removed first and placed last, so that after a crash the files
    are all old, all new, or the last one is missing.

    Args:
        files: Pieces and path of each file; the file that refers to the others comes last.

    Raises:
        OSError: A file cannot be written.
    """
    written = 0
    temporaries: list[tuple[Path, Path]] = []
    try:
        for pieces, path in files:
            target = Path(os.path.realpath(path))
            temporary = target.with_name(f".{target.name[:200]}.{os.urandom(6).hex()}.tmp")
            try:
                if path.exists() and not path.is_file():
                    with path.open("wb", buffering=0) as device:
                        written += _write(pieces, device)
                    continue
                with temporary.open("xb", buffering=0) as file:
                    temporaries.append((temporary, target))
                    written += _write(pieces, file)
                    with suppress(FileNotFoundError):
                        os.fchmod(file.fileno(), target.stat().st_mode & 0o7777)
                    os.fsync(file.fileno())
            except OSError as error:
                # The error names the temporary file, or none, as for a full disk.
                if error.errno is None or error.filename not in {None, str(temporary)}:
                    raise
                raise type(error)(error.errno, error.strerror, str(path)) from None
        if len(temporaries) > 1:
            temporaries[-1][1].unlink(missing_ok=True)
        for temporary, target in temporaries:
            temporary.replace(target)
    except BaseException:
        for temporary, _ in temporaries:
            temporary.unlink(missing_ok=True)
        raise
    return written


def _write(pieces: Iterable[Piece], file: BinaryIO) -> int:
    total = 0
    for piece in pieces:
        view = memoryview(piece)
        # A call may write only a part, on most systems at most 2 GiB.
        while view:
            done = file.write(view[:_CHUNK])
            total += done
            view = view[done:]
    return total
