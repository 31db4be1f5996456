"""Write files piece by piece, so that a crash leaves the old file or the new one."""

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
        ProgramError: It is neither, or the file was opened for text.
        OSError: The file cannot be written; the old one is as it was.
    """
    if not isinstance(path_or_file, str | os.PathLike):
        if isinstance(path_or_file, TextIOBase):
            raise ProgramError("found a file opened for text, expected one opened with mode 'wb'")
        if callable(getattr(path_or_file, "write", None)):
            return _write(pieces, path_or_file)
    path = require_path(path_or_file, otherwise="or a file opened with mode 'wb'")
    return write_files([(pieces, path)])


def write_files(files: Iterable[tuple[Iterable[Piece], Path]]) -> int:
    """Write several files that belong together, and return how many bytes they were.

    All are written under temporary names and flushed to the disk before the first is renamed. The
    last one is what refers to the others: while old and new ones could be mixed it is not there.
    If the process crashes, the files are all old, or all new, or the last one is missing
    (its old and new versions are in the same folder under hidden names).

    Args:
        files: The pieces and the path of each, that of the file that refers to the others last.

    Raises:
        ProgramError: Two of them would be one file.
        OSError: A file cannot be written; the old ones are as they were.
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
                raise ProgramError(f"{path}: found two files to write to it, expected one")
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
    """A file under its temporary name, and the path that it is for."""

    name: str
    path: Path

    @property
    def aside(self) -> str:
        """Return where the old file waits until all new ones are in place."""
        return f"{self.name.removesuffix('.tmp')}.old"


def replaces_file(path: Path) -> bool:
    """Return whether writing to ``path`` makes or replaces a file; not for devices and pipes.

    Args:
        path: Where something would be written.

    Raises:
        OSError: It is a folder, or a link that leads in a circle.
    """
    return _target(path) is not None


def _replace(temporaries: Sequence[_Temporary]) -> None:
    """Give files their names; what refers to the others goes first and comes back last."""
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
        # Undone in the same order, so that old and new files are never mixed.
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
    """Rename a file, and wait until the disk knows."""
    os.replace(name, path)  # noqa: PTH105  (Path.replace would only wrap this)
    # Some file systems cannot sync a folder; there the order of renames is theirs to keep.
    with suppress(OSError):
        folder = os.open(Path(path).parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _target(path: Path) -> Path | None:
    """Return the file to replace, or None where ``path`` leads to a device or a pipe.

    Raises:
        OSError: It is a folder, or a link that leads in a circle.
    """
    if path.is_absolute() and path.parts[1:2] in {("dev",), ("proc",)}:
        # Also where /dev/stdout is a file: it is open already, another one would not be it.
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
    """Open a device or a pipe; of what this process has open already, the same file again."""
    name = str(path)
    number = {"/dev/stdout": "1", "/dev/stderr": "2"}.get(name, name.removeprefix("/dev/fd/"))
    if not number.isdecimal():
        return path.open("wb", buffering=0)
    # Opened again by its path, a file would be truncated, and lose what was printed.
    return os.fdopen(os.dup(int(number)), "wb", buffering=0)


def _write_named(pieces: Iterable[Piece], file: BinaryIO, path: Path) -> int:
    try:
        return _write(pieces, file)
    except OSError as error:
        # A full disk says nothing of the file; ours has a temporary name that means nothing.
        if error.errno is None or error.filename is not None:
            raise
        raise type(error)(error.errno, error.strerror, str(path)) from None


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
    """Create a file with an unused name next to ``path``; module tempfile is slow to import."""
    while True:
        name = str(path.with_name(f".{path.name[:200]}.{os.urandom(6).hex()}.tmp"))
        with suppress(FileExistsError):
            try:
                return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), name
            except FileNotFoundError as error:
                # The name is ours; what is missing is the folder that the caller named.
                raise FileNotFoundError(error.errno, error.strerror, str(path.parent)) from None
            except OSError as error:
                # Nor is it our name that the folder refuses.
                raise type(error)(error.errno, error.strerror, str(path)) from None
