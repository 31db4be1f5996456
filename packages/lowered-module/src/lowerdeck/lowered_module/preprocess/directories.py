"""Where a cache keeps its entries: a directory of the system, or one behind a URL."""

from __future__ import annotations

import contextlib
import importlib
import os
import stat
import tempfile
import uuid
from pathlib import Path
from typing import Any

from lowerdeck.lowered_module.errors import CacheError

# Neither through a link nor waiting for who writes into a pipe, where the system knows of either.
_FLAGS = (
    os.O_RDONLY
    | getattr(os, "O_BINARY", 0)
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)
)
# What others may do to an entry: change it. Reading it is theirs to have.
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_LOCAL = "file://"


def opened(directory: str) -> Directory | RemoteDirectory:
    """Return the directory, made if it is not there.

    Args:
        directory: A path or a URL.

    Raises:
        CacheError: It cannot be made.
    """
    try:
        if "://" in directory and not directory.startswith(_LOCAL):
            return RemoteDirectory(directory)
        return Directory(directory.removeprefix(_LOCAL))
    except Exception as error:  # each file system has errors of its own
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise CacheError(
            f"no directory for a cache can be made at {directory!r} ({reason}): name another "
            "one, or lower without a cache"
        ) from error


class Directory:
    """A directory of the system, in which only the user's own entries count.

    Args:
        path: Where it is.

    Raises:
        OSError: It cannot be made.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def read(self, name: str) -> bytes:
        """Return what an entry holds; nothing if somebody else could have written it.

        Args:
            name: The entry.

        Raises:
            OSError: It is not there, or is no plain file.
        """
        with os.fdopen(os.open(self._path / name, _FLAGS), "rb") as file:
            return file.read() if _is_own(os.fstat(file.fileno())) else b""

    def write(self, name: str, content: bytes) -> None:
        """Let an entry appear, whole, in place of an older one.

        Args:
            name: The entry.
            content: What it holds.

        Raises:
            OSError: It cannot be written; the older one is as it was.
        """
        handle, draft = tempfile.mkstemp(dir=self._path, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            Path(draft).replace(self._path / name)
        except BaseException:
            Path(draft).unlink(missing_ok=True)
            raise


class RemoteDirectory:
    """A directory behind a URL, such as a bucket.

    Args:
        url: What ``fsspec`` knows.

    Raises:
        Exception: It is not known, or cannot be made.
    """

    def __init__(self, url: str) -> None:
        # Of the extra "url"; today torch needs it as well.
        fsspec = importlib.import_module("fsspec")
        self._files: Any
        self._files, self._path = fsspec.core.url_to_fs(url)
        self._files.makedirs(self._path, exist_ok=True)

    def read(self, name: str) -> bytes:
        """Return what an entry holds.

        Args:
            name: The entry.

        Raises:
            OSError: It is not there, or cannot be read.
        """
        try:
            content: bytes = self._files.cat_file(f"{self._path}/{name}")
        except OSError:
            raise
        except Exception as error:
            raise OSError(f"{type(error).__name__}: {error}") from error
        return content

    def write(self, name: str, content: bytes) -> None:
        """Let an entry appear, whole, in place of an older one.

        Args:
            name: The entry.
            content: What it holds.

        Raises:
            OSError: It cannot be written.
        """
        draft = f"{self._path}/{uuid.uuid4().hex}.part"
        try:
            self._files.pipe_file(draft, content)
            self._files.mv(draft, f"{self._path}/{name}")
        except Exception as error:
            self._remove(draft)
            raise OSError(f"{type(error).__name__}: {error}") from error

    def _remove(self, draft: str) -> None:
        # It was not written at all, or nothing can be.
        with contextlib.suppress(Exception):
            self._files.rm_file(draft)


def _is_own(status: os.stat_result) -> bool:
    """Return whether only this user (or an administrator) can have written a file."""
    if not stat.S_ISREG(status.st_mode):
        return False
    if not hasattr(os, "geteuid"):
        return True
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & _WRITABLE_BY_OTHERS
