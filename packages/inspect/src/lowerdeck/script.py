"""The entry point of the script ``lowerdeck``.

Not part of a package: importing ``lowerdeck.inspect`` takes tenths of a second, during which
Ctrl-C would print a traceback.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import _exit as end_process
from types import FrameType

_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command of ``lowerdeck`` and return its exit status.

    Args:
        arguments: The command line after ``lowerdeck``. By default ``sys.argv``; Ctrl-C then ends
            the process immediately while it loads.

    Returns:
        As ``lowerdeck.inspect.command_line.main``.

    Raises:
        SystemExit: The arguments are invalid, or help or the version was requested.

    Example:
        >>> import contextlib, io
        >>> with contextlib.redirect_stdout(io.StringIO()) as shown:
        ...     status = main(["--version"])
        >>> status == 0 and "lowerdeck-serializer" in shown.getvalue()
        True
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    if arguments is not None or "--debug" in words:
        # Imported here and below, because the import may be interrupted.
        from lowerdeck.inspect.command_line import run_command

        return run_command(words)
    try:
        with _ended_by_interrupts(""):
            from lowerdeck.inspect.command_line import run_command
        return run_command(words, _ended_by_interrupts)
    except KeyboardInterrupt:
        # Interrupted between two handlers.
        return _INTERRUPTED


@contextmanager
def _ended_by_interrupts(name: str) -> Iterator[None]:
    """Let Ctrl-C end the process with one line and status 130; only for imports.

    An exception is unreliable during imports: C extensions ignore it, convert it to another error,
    or leave modules whose next import fails.
    """
    before = signal.getsignal(signal.SIGINT)
    if not callable(before):
        # Ignored, as in a background process of a shell.
        yield
        return

    def end(_number: int, _frame: FrameType | None) -> None:
        line = f"{' '.join(('lowerdeck', name)).rstrip()}: interrupted\n"
        try:
            # Not through sys.stderr, which may be writing already, or None.
            os.write(2, line.encode("ascii", "backslashreplace"))
        finally:
            end_process(_INTERRUPTED)

    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
