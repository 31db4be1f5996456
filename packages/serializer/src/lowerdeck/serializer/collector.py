"""Pause the cyclic garbage collector while a file is decoded."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_held() -> Iterator[None]:
    """Pause the garbage collector.

    The collector is global: if two threads pause it, the first to finish resumes it for both.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
