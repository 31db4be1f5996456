"""Say how far a lowering is: to a callback, or on a bar where a terminal is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm  # type: ignore[import-untyped]

Progress = Callable[[int, int, str], None]
"""Called with the number of partitions done, the number of all, and the last one's label."""


@contextmanager
def shown(progress: Progress | None, total: int) -> Iterator[Progress]:
    """Yield what to call after each partition.

    Args:
        progress: The caller's own callback; None shows a bar if standard error is a terminal.
        total: Number of partitions.
    """
    if progress is not None:
        yield progress
    elif total < 2 or not sys.stderr.isatty():
        yield _quiet
    else:
        with tqdm(total=total, desc="lowering", unit="partition", leave=False) as bar:

            def show(done: int, total: int, label: str) -> None:
                del total
                bar.set_postfix_str(label)
                bar.update(done - bar.n)

            yield show


def _quiet(done: int, total: int, label: str) -> None:
    del done, total, label
