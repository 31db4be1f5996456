"""Hold the cyclic garbage collector back while many objects are made that all live on."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Switch:
    """The collector's switch, and how many hold it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0
        self._was_on = False

    def take(self) -> None:
        with self._lock:
            if not self._holders:
                self._was_on = gc.isenabled()
                gc.disable()
            self._holders += 1

    def let_go(self) -> None:
        with self._lock:
            self._holders -= 1
            if not self._holders and self._was_on:
                gc.enable()


_SWITCH = _Switch()


@contextmanager
def collector_held() -> Iterator[None]:
    """Keep the collector from walking a growing graph again and again to find nothing.

    Nodes refer to each other, so that each pass of it walks all graphs that there are: a quarter
    to a third of the time of building large ones. It is a switch of the whole process, so that
    holders are counted: the first switches it off, and the last leaves it as the first found it,
    whichever threads they are in. Do not hold it while code of users runs, which may leave
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
    _SWITCH.take()
    try:
        yield
    finally:
        _SWITCH.let_go()
