"""Progress of a lowering on standard error, and captured messages of torch."""

from __future__ import annotations

import io
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from typing import Any, TextIO

from tqdm import tqdm  # type: ignore[import-untyped]

from lowerdeck.inspect import is_closed

Progress = Callable[[int, int, str], None]
"""Called with the number of finished partitions, the total number, and the last one's label."""


@contextmanager
def shown(progress: Progress | None, total: int) -> Iterator[Progress]:
    """Yield the callback to call after each finished partition.

    Args:
        progress: The user's callback; None shows a progress bar if standard error is a terminal.
    """
    if progress is not None:
        yield progress
        return
    # tqdm takes a closed stream for a terminal.
    disable = True if total < 2 or is_closed("stderr") else None
    with tqdm(total=total, desc="lowering", unit="partition", leave=False, disable=disable) as bar:

        def show(done: int, _: int, label: str) -> None:
            bar.set_postfix_str(label)
            bar.update(done - bar.n)

        yield show


class Stages:
    """Context manager that times stages, and shows a bar if standard error is a terminal.

    Args:
        names: Names of the stages, in order.

    Attributes:
        seconds: Wall time of each finished stage.

    Example:
        >>> with Stages(["export", "lower"]) as stages:
        ...     with stages.stage("export"):
        ...         pass
        >>> list(stages.seconds)
        ['export']
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.seconds: dict[str, float] = {}
        # With `disable=None` tqdm hides the bar if stderr is a pipe, but not if it is None.
        self._closed = is_closed("stderr")
        disable = True if self._closed else None
        # The current stream, as messages may be captured meanwhile.
        self._stderr = sys.stderr
        self._bar: Any = tqdm(total=len(names), unit="stage", disable=disable, leave=False)

    def __enter__(self) -> Stages:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the bar."""
        self._bar.close()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Show and time one stage."""
        self._bar.set_description(name)
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start
        self._bar.set_postfix_str("")
        self._bar.update()

    def trial(self, done: int, total: int, label: str) -> None:
        """Print a line on standard error, also without a terminal; usable as ``Progress``."""
        if not self._closed:
            self._bar.write(f"  {done} of {total}: {label}", file=self._stderr)
            self._bar.refresh()
            self._stderr.flush()

    def partition(self, done: int, total: int, label: str) -> None:
        """Show the progress of a stage; usable as ``Progress``."""
        self._bar.set_postfix_str(f"partition {done} of {total}: {label}")


@contextmanager
def buffered_stderr() -> Iterator[None]:
    """Hold back messages on stderr; print them at the end, or drop them after an error.

    When torch raises an error, it also prints the graph and logs warnings.

    Example:
        >>> with buffered_stderr():
        ...     _ = sys.stderr.write("")
    """
    real, buffer = sys.stderr, io.StringIO()
    if not is_closed("stderr"):
        _move(real, buffer)
    try:
        with redirect_stderr(buffer):
            yield
    finally:
        # Also handlers created inside, which use the replaced stream.
        _move(buffer, real)
    if not is_closed("stderr"):
        real.write(buffer.getvalue())


def _move(old: TextIO, new: TextIO) -> None:
    """Redirect torch's log handlers from one stream to another."""
    names = [name for name in logging.root.manager.loggerDict if f"{name}.".startswith("torch.")]
    for logger in map(logging.getLogger, names):
        for handler in logger.handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is old:
                handler.setStream(new)
