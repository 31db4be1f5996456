"""Seeds of random suites: all of them at night, a tenth of them in CI."""

from __future__ import annotations

import os
import time

NIGHTLY = bool(os.environ.get("LOWERDECK_NIGHTLY"))
"""Whether whole suites run (``nox -s nightly`` sets the variable)."""
_SECONDS_A_DAY = 86_400


def today() -> int:
    """Return the number of the day."""
    return int(time.time() // _SECONDS_A_DAY)


def seeds(count: int, *, first: int = 0) -> list[int]:
    """Return ``count`` seeds at night, otherwise a tenth of them that depends on the date.

    The tenths of ten days cover all seeds, so that CI meets no seed that the nightly run has not.

    Args:
        count: How many seeds the whole suite has.
        first: The first seed.
    """
    if NIGHTLY:
        return list(range(first, first + count))
    few = -(-count // 10)
    return [first + (today() * few + step) % count for step in range(few)]
