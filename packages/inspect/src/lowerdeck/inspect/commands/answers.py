"""Output, errors and exit statuses of commands."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum
from typing import Protocol

from lowerdeck.serializer import ContentError, FormatError, MagicError, SerializerError, printable

_LONGEST = 2000


class ExitStatus(IntEnum):
    """Exit statuses of ``lowerdeck``.

    ``DONE``: success; ``DIFFERS``: a comparison found a difference; ``USAGE``: invalid arguments;
    ``BAD_INPUT``: a file or program is invalid or missing; ``FAILED``: valid input, but a missing
    requirement, a full disk or a bug; ``INTERRUPTED``: Ctrl-C.
    """

    DONE = 0
    DIFFERS = 1
    USAGE = 2
    BAD_INPUT = 3
    FAILED = 4
    INTERRUPTED = 130


EXIT_STATUS_HELP = (
    "exit status: 0 done, 1 differs, 2 wrong arguments, 3 bad input, 4 failed here, "
    "130 interrupted"
)


class CommandError(Exception):
    """A command failed; only the message is shown to the user.

    Attributes:
        exit_status: The command's exit status.
    """

    def __init__(self, message: str, exit_status: ExitStatus = ExitStatus.BAD_INPUT) -> None:
        self.exit_status = exit_status
        super().__init__(message)


def say(*lines: str) -> None:
    """Print lines, with unprintable and invisible characters escaped."""
    with printing():
        for line in lines:
            print(printable(line))


@contextmanager
def printing() -> Iterator[None]:
    """Convert errors of writing to stdout, such as a full disk, to errors that name it.

    A closed output (``>&-``) is an error too: ``sys.stdout`` is None, and ``print`` does nothing.

    Raises:
        CommandError: The output cannot be written, or is closed.
        BrokenPipeError: The reader closed the pipe, which callers do not treat as an error.
    """
    if is_closed("stdout"):
        raise CommandError("stdout is closed", ExitStatus.FAILED)
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise CommandError(
            f"cannot write {_describe('stdout', error)}", ExitStatus.FAILED
        ) from error


def complain(name: str, message: str) -> None:
    """Print one line to stderr.

    Args:
        name: Name of the command, or ``""``.
        message: The error message; truncated, escaped and joined to one line.
    """
    if is_closed("stderr"):
        return  # print would use stdout instead
    if len(message) > _LONGEST:
        message = f"{message[: _LONGEST // 2]} ... {message[-_LONGEST // 2 :]}"
    text = " ".join(printable(part) for part in message.splitlines())
    line = f"{' '.join(('lowerdeck', name)).rstrip()}: {text}".rstrip()
    # An error of writing must not change the exit status.
    with suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


@contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Convert errors of reading a file to errors that name it.

    Args:
        path: The file that is read. If an ``OSError`` names another file, so does the error.

    Raises:
        CommandError: The file is invalid or cannot be opened; the exit status is ``BAD_INPUT``.
    """
    try:
        yield
    except FormatError as error:
        verdict = "invalid" if isinstance(error, ContentError) else "damaged"
        if isinstance(error, MagicError) and error.field == "file identifier":
            kind = ".ptd" if os.fspath(path).endswith(".ptd") else ".pte"
            verdict = f"not a {kind} file"
        raise CommandError(f"{os.fspath(path)}: {verdict}: {error}") from error
    except OSError as error:
        # The error may be about another file that the first one refers to.
        other = error.filename if isinstance(error.filename, str) else path
        raise CommandError(_describe(other, error)) from error


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Re-raise an error of writing ``path`` as a ``CommandError`` that names it.

    Args:
        path: The file or folder that is written.

    Raises:
        CommandError: The file cannot be written; the exit status is ``FAILED``.
    """
    try:
        yield
    except OSError as error:
        message = f"cannot write {_describe(path, error)}"
        raise CommandError(message, ExitStatus.FAILED) from error


def status_of(error: BaseException) -> ExitStatus | None:
    """Return the exit status for an error, or None for an unexpected one.

    Errors of other packages have an attribute ``exit_status``.
    """
    status = getattr(error, "exit_status", None)
    if isinstance(status, int):
        return ExitStatus(status)
    if isinstance(error, SerializerError):
        return ExitStatus.BAD_INPUT
    if isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError):
        return ExitStatus.BAD_INPUT
    return ExitStatus.FAILED if isinstance(error, OSError | MemoryError) else None


def flush_stdout() -> None:
    """Flush stdout, so that errors are raised now and not at exit.

    Raises:
        CommandError: The output cannot be written.
        BrokenPipeError: The reader closed the pipe, which callers do not treat as an error.
    """
    if is_closed("stdout"):
        return  # Printing has failed before.
    with printing():
        sys.stdout.flush()


def is_closed(name: str) -> bool:
    """Return whether Python was started with a stream closed (``>&-``), so that it is None."""
    return getattr(sys, name) is None


def _describe(path: str | os.PathLike[str], error: OSError) -> str:
    return f"{os.fspath(path)}: {error.strerror or error}"


_UNITS = ("kB", "MB", "GB", "TB")


def size_text(nbytes: int) -> str:
    """Return a size in decimal units, such as ``46.8 MB``."""
    if nbytes < 1000:
        return f"{nbytes} B"
    value, unit = nbytes / 1000, 0
    while value >= 1000 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.1f} {_UNITS[unit]}"


def share_text(part: int, whole: int) -> str:
    """Return the percentage of ``part`` in ``whole``, such as ``99.1 %``."""
    return f"{100 * part / whole:.1f} %" if whole else "0.0 %"


class Command(Protocol):
    """One command, which packages provide through the entry-point group ``lowerdeck.commands``.

    Attributes:
        help: One-line description.
    """

    help: str

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments."""

    def run(self, args: argparse.Namespace) -> int:
        """Run the command.

        Returns:
            The exit status, one of :class:`ExitStatus`.

        Raises:
            Exception: An error with an attribute ``exit_status`` ends the command with this status
                and its message in one line; other errors are reported as bugs.
        """
