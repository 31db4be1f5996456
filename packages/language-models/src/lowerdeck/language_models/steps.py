"""What a long export is at, told while it goes on."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from transformers.utils import logging

from lowerdeck.inspect import is_closed
from lowerdeck.serializer import printable


class Steps:
    """Times the steps of an export, and tells each on standard error when it begins.

    A line for each, in a pipe as on a terminal: whoever reads a log wants to know it, too.

    Args:
        shown: Whether they are told.

    Attributes:
        seconds: Wall time of each step that is done.

    Example:
        >>> steps = Steps(shown=False)
        >>> with steps.step("load", "loading a folder"):
        ...     pass
        >>> list(steps.seconds)
        ['load']
    """

    def __init__(self, *, shown: bool = False) -> None:
        self.seconds: dict[str, float] = {}
        self._shown = shown and not is_closed("stderr")
        self._began = time.perf_counter()

    @contextmanager
    def step(self, name: str, what: str) -> Iterator[None]:
        """Tell and time one step."""
        start = time.perf_counter()
        if self._shown:
            # Nobody who reads it is no reason to stop.
            with suppress(OSError, ValueError):
                line = f"{start - self._began:7.1f} s  {printable(what)}"
                print(line, file=sys.stderr, flush=True)
        yield
        self.seconds[name] = time.perf_counter() - start


@contextmanager
def without_bars() -> Iterator[None]:
    """Hold back the bars that transformers draws while it loads a model."""
    # Not by its switch, which is one for all libraries of Hugging Face and forgets how it stood.
    before = logging.set_tqdm_hook(lambda _, given, __: logging.EmptyTqdm(*given))
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)
