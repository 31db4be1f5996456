"""Keep Python's cycle collector out of the way while graphs are built."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_held() -> Iterator[None]:
    """Hold the cycle collector while nodes are made by the thousand.

    Nodes refer to each other, so that each pass of the collector walks all graphs that there are:
    with it, time grows faster than the number of nodes. Backends and partitioners run without
    this, as they may leave garbage behind.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
