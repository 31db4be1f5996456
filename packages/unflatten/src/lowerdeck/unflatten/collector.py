"""Hold the cyclic garbage collector back while many objects are made that all live on."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_held() -> Iterator[None]:
    """Keep the collector from walking the growing module again and again to find nothing.

    It is on or off afterwards as it was before, whatever happens.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
