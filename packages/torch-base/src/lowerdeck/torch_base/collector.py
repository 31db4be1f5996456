"""Pause the cyclic garbage collector while large graphs are built."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_LOCK = threading.Lock()
_WAS_ENABLED: list[bool] = []
"""Whether the collector was enabled at each active ``collector_held``."""


@contextmanager
def collector_held() -> Iterator[None]:
    """Pause the cyclic garbage collector, which frees nothing in a growing graph.

    The collector is process-wide: it is restored when the last active context, in any thread,
    ends. Cyclic garbage is not freed until then.

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
        _WAS_ENABLED.append(gc.isenabled())
        gc.disable()
    try:
        yield
    finally:
        with _LOCK:
            # The last remaining entry is the first context's.
            if _WAS_ENABLED.pop() and not _WAS_ENABLED:
                gc.enable()
