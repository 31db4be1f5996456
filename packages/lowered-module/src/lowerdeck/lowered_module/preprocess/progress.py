"""Say how far a lowering is: to a callback, or on a bar where a terminal is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm  # type: ignore[import-untyped]

from lowerdeck.serializer import is_closed

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
        return
    # Without a terminal tqdm shows nothing; it takes a closed stream for a terminal.
    disable = True if total < 2 or is_closed("stderr") else None
    with tqdm(total=total, desc="lowering", unit="partition", leave=False, disable=disable) as bar:

        def show(done: int, _: int, label: str) -> None:
            bar.set_postfix_str(label)
            bar.update(done - bar.n)

        yield show
