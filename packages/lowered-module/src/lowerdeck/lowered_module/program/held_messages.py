"""What torch says on its own while it works, held back until it is known whether it worked."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import TextIO

from lowerdeck.inspect import is_closed


@contextmanager
def held_messages() -> Iterator[None]:
    """Hold what is printed and logged on stderr inside: told at the end, forgotten on an error.

    torch prints a failing graph and logs warnings beside the error that it raises, and all that
    is of use is in the error.

    Example:
        >>> with held_messages():
        ...     _ = sys.stderr.write("")
    """
    real, held = sys.stderr, io.StringIO()
    if not is_closed("stderr"):
        _move(real, held)
    try:
        with redirect_stderr(held):
            yield
    finally:
        # Also those that were made inside, which took the stream that they found.
        _move(held, real)
    if not is_closed("stderr"):
        real.write(held.getvalue())


def _move(old: TextIO, new: TextIO) -> None:
    """Let torch's loggers that write to one stream write to another one."""
    names = [name for name in logging.root.manager.loggerDict if f"{name}.".startswith("torch.")]
    for logger in map(logging.getLogger, names):
        for handler in logger.handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is old:
                handler.setStream(new)
