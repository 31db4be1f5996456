"""Pause of the cyclic garbage collector while large graphs are built."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_LOCK = threading.Lock()
_WAS_ON: list[bool] = []
"""For each holder, whether the collector was on when it came."""


@contextmanager
def collector_held() -> Iterator[None]:
    """Pause the cyclic garbage collector, which finds nothing in a growing graph.

    Each pass walks all graphs of the process: a quarter to a third of the time of building large
    ones. The switch is one for the process: the first holder turns it off, and the last one, in
    whatever thread, restores it. Do not hold it while code of users runs, which may leave
    garbage behind.

    Example:
        >>> import gc
        >>> from lowerdeck.torch_base import collector_held
        >>> with collector_held():
        ...     gc.isenabled()
        False
        >>> gc.isenabled()
        True
    """
    with _LOCK:
        _WAS_ON.append(gc.isenabled())
        gc.disable()
    try:
        yield
    finally:
        with _LOCK:
            # The entry that is left at last is that of the first holder.
            if _WAS_ON.pop() and not _WAS_ON:
                gc.enable()
