"""A lock that admits one call at a time: the methods of a program use the same memory."""

from __future__ import annotations

import threading
from types import TracebackType

from lowerdeck.runner.errors import BusyError


class Turn:
    """Held while a method of a program is loaded or runs, or its state is reset.

    A concurrent call is rejected instead of queued: the results of calls with state would depend
    on thread order, and a delegate that calls its own program would deadlock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        """Acquire the lock.

        Raises:
            BusyError: It is held.
        """
        if not self._lock.acquire(blocking=False):
            raise BusyError(
                "a method of this program is running, in another thread or around this call; its "
                "memory serves one call at a time: give each thread a program.clone(), which "
                "shares constants, or call one after the other"
            )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Release the lock."""
        self._lock.release()
