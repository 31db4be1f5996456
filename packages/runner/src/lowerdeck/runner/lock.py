"""Non-reentrant lock of a program, whose methods share memory."""

from __future__ import annotations

import threading
from types import TracebackType

from lowerdeck.runner.errors import BusyError


class NonReentrantLock:
    """Lock that raises an error instead of waiting while it is held.

    It is held while a method is loaded or runs, and while state is reset. Queued calls would make
    results with state depend on thread order, and deadlock a delegate that calls its own program.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        """Acquire the lock.

        Raises:
            BusyError: The lock is held.
        """
        if not self._lock.acquire(blocking=False):
            raise BusyError(
                "another call of this program is in progress, in another thread or as a caller of "
                "this one, and all methods share memory: use a program.clone() per thread, which "
                "shares constants, or serialize the calls"
            )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Release the lock."""
        self._lock.release()
