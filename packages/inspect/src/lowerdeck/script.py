"""The entry point of the script ``lowerdeck``.

This module is not part of ``lowerdeck.inspect``, whose import takes tenths of a second, during
which Ctrl-C would print a traceback.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command of ``lowerdeck`` and return its exit status.

    Args:
        arguments: The command line after ``lowerdeck``. By default ``sys.argv``; Ctrl-C then ends
            the process at once while the command is imported.

    Returns:
        The exit status, as from ``lowerdeck.inspect.command_line.main``.

    Raises:
        SystemExit: The arguments are invalid, or the help of a command was requested.

    Example:
        >>> import contextlib, io
        >>> with contextlib.redirect_stdout(io.StringIO()) as shown:
        ...     status = main(["--version"])
        >>> status == 0 and "lowerdeck-serializer" in shown.getvalue()
        True
    """
    ends = arguments is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ends:
        # An exception is unreliable during imports: C extensions ignore it, convert it to another
        # error, or leave modules whose next import fails.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from lowerdeck.inspect.command_line import run_command

    def loaded() -> None:
        if ends:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    return run_command(list(sys.argv[1:] if arguments is None else arguments), loaded)


if __name__ == "__main__":
    sys.exit(main())
