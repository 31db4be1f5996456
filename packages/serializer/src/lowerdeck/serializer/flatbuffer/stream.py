"""Write files piece by piece and atomically."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from errno import EISDIR
from io import TextIOBase
from pathlib import Path
from typing import BinaryIO, TypeAlias

from lowerdeck.serializer.errors import ProgramError
from lowerdeck.serializer.flatbuffer.paths import require_path

Piece: TypeAlias = bytes | bytearray | memoryview

_CHUNK = 1 << 24


def write_pieces(pieces: Iterable[Piece], path_or_file: str | os.PathLike[str] | BinaryIO) -> int:
    """Write pieces to a path or an open file and return the number of bytes.

    A regular or new file is written as a temporary file in the same folder, flushed to disk and
    renamed. For a symbolic link the target is replaced. Devices and pipes are written directly.

    Args:
        pieces: The bytes in order.

    Raises:
        ProgramError: The target is neither, or the file was opened for text.
        OSError: The file cannot be written; an existing file is unchanged.
    """
    if not isinstance(path_or_file, str | os.PathLike):
        if isinstance(path_or_file, TextIOBase):
            raise ProgramError("found a file opened for text, expected one opened with mode 'wb'")
        if callable(getattr(path_or_file, "write", None)):
            return _write(pieces, path_or_file)
    path = require_path(path_or_file, otherwise="or a file opened with mode 'wb'")
    return write_files([(pieces, path)])


def write_files(files: Iterable[tuple[Iterable[Piece], Path]]) -> int:
    """Write several files as one transaction, and return their total size in bytes.

    All are written under temporary names and flushed to disk before the first is renamed. The last
    file refers to the others; it is absent while old and new files are mixed. After a crash the
    files are all old, all new, or the last one is missing (its old and new versions are in the
    same folder under hidden names).

    Args:
        files: Pieces and path of each file; the file that refers to the others comes last.

    Raises:
        ProgramError: Two paths lead to the same file.
        OSError: A file cannot be written; existing files are unchanged.
    """
    written = 0
    temporaries: list[_Temporary] = []
    try:
        for pieces, path in files:
            target = _target(path)
            if target is None:
                with _open_special(path) as special:
                    written += _write_named(pieces, special, path)
                continue
            if any(other.path == target for other in temporaries):
                raise ProgramError(f"{path}: found two files for this path, expected one")
            handle, name = _new_file(target)
            temporaries.append(_Temporary(name, target))
            with os.fdopen(handle, "wb", buffering=0) as file:
                written += _write_named(pieces, file, path)
                with suppress(FileNotFoundError):
                    os.fchmod(file.fileno(), target.stat().st_mode & 0o7777)
                os.fsync(file.fileno())
        _replace(temporaries)
    except BaseException:
        for temporary in temporaries:
            with suppress(OSError):
                os.unlink(temporary.name)  # noqa: PTH108
        raise
    return written


@dataclass(frozen=True, slots=True)
class _Temporary:
    """A temporary file and its final path."""

    name: str
    path: Path

    @property
    def aside(self) -> str:
        """Return the name of the old file until all new files are in place."""
        return f"{self.name.removesuffix('.tmp')}.old"


def replaces_file(path: Path) -> bool:
    """Return whether writing to ``path`` creates or replaces a file; False for devices and pipes.

    Raises:
        OSError: The path is a folder or a symlink cycle.
    """
    return _target(path) is not None


def _replace(temporaries: Sequence[_Temporary]) -> None:
    """Rename files to their final paths; the last file is removed first and replaced last."""
    if len(temporaries) == 1:
        _rename(temporaries[0].name, temporaries[0].path)
        return
    aside: list[_Temporary] = []
    placed: list[_Temporary] = []
    try:
        for temporary in reversed(temporaries):
            if temporary.path.exists():
                aside.append(temporary)
                _rename(temporary.path, temporary.aside)
        for temporary in temporaries:
            placed.append(temporary)
            _rename(temporary.name, temporary.path)
    except BaseException:
        # The last file stays absent while old and new files are mixed.
        for temporary in reversed(placed):
            if not Path(temporary.name).exists():
                temporary.path.unlink()
        for temporary in reversed(aside):
            if Path(temporary.aside).exists():
                _rename(temporary.aside, temporary.path)
        raise
    for temporary in aside:
        with suppress(OSError):
            os.unlink(temporary.aside)  # noqa: PTH108


def _rename(name: str | Path, path: str | Path) -> None:
    """Rename a file and flush its folder to disk."""
    os.replace(name, path)  # noqa: PTH105  (Path.replace would only wrap this)
    # Some file systems cannot sync a folder; the order of renames is then theirs.
    with suppress(OSError):
        folder = os.open(Path(path).parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _target(path: Path) -> Path | None:
    """Return the file to replace, or None for a device or a pipe.

    Raises:
        OSError: The path is a folder or a symlink cycle.
    """
    if path.is_absolute() and path.parts[1:2] in {("dev",), ("proc",)}:
        # Even if /dev/stdout is redirected to a file, which must not be replaced.
        return None
    real = Path(os.path.realpath(path))
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return real
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(EISDIR, "found a folder, expected the name of a file", str(path))
    return real if stat.S_ISREG(mode) else None


def _open_special(path: Path) -> BinaryIO:
    """Open a device or a pipe; duplicate a file descriptor that is already open."""
    name = str(path)
    number = {"/dev/stdout": "1", "/dev/stderr": "2"}.get(name, name.removeprefix("/dev/fd/"))
    if not number.isdecimal():
        return path.open("wb", buffering=0)
    # Reopening a redirected file by path would truncate it.
    return os.fdopen(os.dup(int(number)), "wb", buffering=0)


def _write_named(pieces: Iterable[Piece], file: BinaryIO, path: Path) -> int:
    try:
        return _write(pieces, file)
    except OSError as error:
        # Errors such as a full disk do not name the file; report the final path.
        if error.errno is None or error.filename is not None:
            raise
        raise type(error)(error.errno, error.strerror, str(path)) from None


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


def _new_file(path: Path) -> tuple[int, str]:
    """Create a temporary file next to ``path``, without ``tempfile``, which is slow to import."""
    while True:
        name = str(path.with_name(f".{path.name[:200]}.{os.urandom(6).hex()}.tmp"))
        with suppress(FileExistsError):
            try:
                return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), name
            except FileNotFoundError as error:
                # Report the missing folder, not the temporary name.
                raise FileNotFoundError(error.errno, error.strerror, str(path.parent)) from None
            except OSError as error:
                # Report the final path, not the temporary name.
                raise type(error)(error.errno, error.strerror, str(path)) from None
