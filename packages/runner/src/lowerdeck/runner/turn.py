"""Non-reentrant lock: the methods of a program share memory."""

from __future__ import annotations

import threading
from types import TracebackType

from lowerdeck.runner.errors import BusyError


class Turn:
    """Lock held while a method is loaded or runs, or state is reset.

    A concurrent call is rejected, not queued: results with state would depend on thread order, and
    a delegate that calls its own program would deadlock.
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
                "a method of this program is running, in another thread or around this call, and "
                "uses the same memory: use a program.clone() per thread, which shares constants, "
                "or serialize the calls"
            )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Release the lock."""
        self._lock.release()
