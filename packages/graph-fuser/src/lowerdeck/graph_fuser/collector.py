"""Hold the cyclic garbage collector back while many objects are made that all live on."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_held() -> Iterator[None]:
    """Keep the collector from walking the growing graph again and again, a third of the time.

    Nothing made meanwhile is garbage, so that each of those walks would find nothing. The
    collector is as before afterwards, whatever happens.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
