"""Seeds of random suites: all of them at night, a tenth of them in CI."""

from __future__ import annotations

import functools
import os
import subprocess
import time
from pathlib import Path

NIGHTLY = bool(os.environ.get("LOWERDECK_NIGHTLY"))
"""Whether whole suites run (``nox -s nightly`` sets the variable)."""
_SECONDS_A_DAY = 86_400


@functools.cache
def today() -> int:
    """Return the number of the day of the checked-out commit, or of the clock without git.

    So a commit has the same cases on every machine, whatever its clock says.
    """
    command = ["git", "-C", str(Path(__file__).parent), "show", "-s", "--format=%ct"]
    try:
        seconds = int(subprocess.run(command, check=True, capture_output=True).stdout)
    except (OSError, subprocess.CalledProcessError):
        seconds = int(time.time())
    return seconds // _SECONDS_A_DAY


def seeds(count: int, *, first: int = 0) -> list[int]:
    """Return ``count`` seeds at night, otherwise a tenth of them by the date of the commit.

    The tenths of ten days cover all seeds, so that CI meets no seed that the nightly run has not.

    Args:
        count: How many seeds the whole suite has.
        first: The first seed.
    """
    if NIGHTLY:
        return list(range(first, first + count))
    few = -(-count // 10)
    return [first + (today() * few + step) % count for step in range(few)]
