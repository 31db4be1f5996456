"""Hold the cyclic garbage collector back while a method is read, rewritten and laid out."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_held() -> Iterator[None]:
    """Keep the collector from walking the caller's program again and again to find nothing.

    The operations of a method live until it is laid out, and are made in such numbers that the
    collector would come often: a quarter of the time of a large program. It is on or off
    afterwards as it was before, whatever happens.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
