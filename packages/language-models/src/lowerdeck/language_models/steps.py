"""Progress of a long export."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from transformers.utils import logging

from lowerdeck.inspect import is_closed
from lowerdeck.serializer import printable


class Steps:
    """Time the steps of an export, and print each to standard error when it begins.

    Args:
        visible: Whether to print the steps.

    Attributes:
        seconds: Wall time of each finished step.

    Example:
        >>> steps = Steps(visible=False)
        >>> with steps.step("load", "loading a folder"):
        ...     pass
        >>> list(steps.seconds)
        ['load']
    """

    def __init__(self, *, visible: bool = False) -> None:
        self.seconds: dict[str, float] = {}
        self._shown = visible and not is_closed("stderr")
        self._began = time.perf_counter()

    @contextmanager
    def step(self, name: str, message: str) -> Iterator[None]:
        """Print and time one step."""
        start = time.perf_counter()
        if self._shown:
            # A closed stderr does not stop the export.
            with suppress(OSError, ValueError):
                line = f"{start - self._began:7.1f} s  {printable(message)}"
                print(line, file=sys.stderr, flush=True)
        yield
        self.seconds[name] = time.perf_counter() - start


@contextmanager
def without_bars() -> Iterator[None]:
    """Suppress the progress bars of transformers while it loads a model."""
    # Not by Hugging Face's global switch, whose previous state cannot be restored.
    before = logging.set_tqdm_hook(lambda _, arguments, __: logging.EmptyTqdm(*arguments))
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)
