"""What a fork of a test process says before it ends, or before its time is over."""

from __future__ import annotations

import os
import select
import time


def read_until(reader: int, deadline: float) -> tuple[bytes, bool]:
    """Return what was written into a pipe, and whether its last writer has ended.

    Args:
        reader: The descriptor of the pipe's end for reading.
        deadline: When to stop, on the clock of ``time.monotonic``.
    """
    data = b""
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([reader], [], [], left)[0]:
            break
        part = os.read(reader, 1 << 16)
        if not part:
            return data, True
        data += part
    return data, False
