"""Keep the cyclic garbage collector from walking a new module's objects again and again."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class _History:
    """What was done in this process.

    Attributes:
        promoted_at: How many full collections there had been when objects grew old here last.
    """

    promoted_at: int = -1


_HISTORY = _History()


@contextmanager
def collector_held() -> Iterator[Callable[[], None]]:
    """Hold the collector back, and yield what makes old the objects that were made meanwhile.

    A module of thousands of nodes is hundreds of thousands of objects, all of which live on. The
    collector would walk them as young ones to find nothing, for a quarter of the time of making
    them. Called old, they wait for the next full collection. Three rules keep that harmless:

    - What was there before is collected first, so that no young garbage of the caller's grows old.
    - It is done once between two full collections, so that a caller who makes and drops modules in
      a loop has them collected as ever.
    - What others froze stays as it is.
    """
    if not gc.isenabled():
        yield _nothing
        return
    full = gc.get_stats()[-1]["collections"]
    may_promote = full != _HISTORY.promoted_at and not gc.get_freeze_count()
    if may_promote:
        gc.collect(1)
    gc.disable()
    try:
        yield _promote if may_promote else _nothing
    finally:
        gc.enable()


def _promote() -> None:
    _HISTORY.promoted_at = gc.get_stats()[-1]["collections"]
    gc.freeze()
    gc.unfreeze()


def _nothing() -> None:
    """Leave all objects to the collector's ordinary course."""
