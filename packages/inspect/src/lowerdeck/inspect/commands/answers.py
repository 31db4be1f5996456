"""Output, errors and exit statuses of commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum

from lowerdeck.serializer import FormatError, SerializerError, printable

_LONGEST = 2000


class ExitStatus(IntEnum):
    """Exit statuses of ``lowerdeck``.

    ``DONE``; ``DIFFERS``: a comparison found a difference; ``USAGE``: wrong arguments;
    ``BAD_INPUT``: a file or program is wrong or missing; ``FAILED``: right input, but something
    is missing or full here, or we are at fault; ``INTERRUPTED``: by Ctrl-C.
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
    """A command cannot do its task; the message is all that its user sees.

    Attributes:
        exit_status: The command's exit status.
    """

    def __init__(self, message: str, exit_status: ExitStatus = ExitStatus.BAD_INPUT) -> None:
        self.exit_status = exit_status
        super().__init__(message)


def say(*lines: str) -> None:
    """Print lines with names from files, escaped so that they cannot control the terminal.

    Args:
        lines: The lines; what is not plainly visible in them is escaped.
    """
    with printing():
        for line in lines:
            print(printable(line))


@contextmanager
def printing() -> Iterator[None]:
    """Name the output where it cannot be written, as a full disk under it: it has no path.

    Without an output (``>&-``) Python has no ``sys.stdout``, and prints into nothing.

    Raises:
        CommandError: It cannot be written, or is closed.
        BrokenPipeError: Its reader closed the pipe, which callers do not treat as an error.
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
    """Print one line of error.

    Args:
        name: Name of the command; empty without one.
        message: What is wrong; shortened, and on one line whatever it quotes.
    """
    if is_closed("stderr"):
        return  # print would take stdout instead
    if len(message) > _LONGEST:
        message = f"{message[: _LONGEST // 2]} ... {message[-_LONGEST // 2 :]}"
    text = " ".join(printable(part) for part in message.splitlines())
    line = f"{' '.join(('lowerdeck', name)).rstrip()}: {text}".rstrip()
    # A full disk under it must not change with which status the command ends.
    with suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


@contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Let an error of a file say which file it is of.

    Args:
        path: The file that is read inside; an error of the system names its own.

    Raises:
        CommandError: The file is wrong or cannot be opened; ends with ``BAD_INPUT``.
    """
    try:
        yield
    except FormatError as error:
        raise CommandError(f"{os.fspath(path)}: {type(error).__name__}: {error}") from error
    except OSError as error:
        # What is read may lead to another file, which is then the one to name.
        other = error.filename if isinstance(error.filename, str) else path
        raise CommandError(_describe(other, error)) from error


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Let an error of a file that is written say which file it is.

    Args:
        path: The file or folder that is written inside.

    Raises:
        CommandError: It cannot be written; ends with ``FAILED``.
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
    """Write what is still held back, so that an error shows now, and not when Python ends.

    Raises:
        CommandError: It cannot be written.
        BrokenPipeError: Its reader closed the pipe, which callers do not treat as an error.
    """
    if is_closed("stdout"):
        return  # Printing has failed before.
    with printing():
        sys.stdout.flush()


def is_closed(name: str) -> bool:
    """Return whether Python was started without an open stream (``>&-``) and has None for it."""
    return getattr(sys, name) is None


def _describe(path: str | os.PathLike[str], error: OSError) -> str:
    return f"{os.fspath(path)}: {error.strerror or error}"
