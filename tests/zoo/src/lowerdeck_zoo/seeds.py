"""What CI runs of random suites and long tables: a part that depends on the date."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

NIGHTLY = bool(os.environ.get("LOWERDECK_NIGHTLY"))
"""Whether whole suites run (``nox -s nightly`` sets the variable)."""
_SECONDS_A_DAY = 86_400


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
    day = int(time.time() // _SECONDS_A_DAY)
    return [first + (day * few + step) % count for step in range(few)]


def keep_todays(
    config: pytest.Config, items: list[pytest.Item], every: Callable[[pytest.Item], int]
) -> None:
    """Leave out the cases of long tables that are not today's, unless it is night.

    Args:
        config: The settings of this run, which are told.
        items: The collected tests; changed in place.
        every: Returns n for a case of a table of which every n-th runs, 1 for any other test.
    """
    if NIGHTLY:
        return
    day, seen = int(time.time() // _SECONDS_A_DAY), Counter[str]()
    chosen: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for item in items:
        table = item.nodeid.partition("[")[0]
        (left if (seen[table] + day) % every(item) else chosen).append(item)
        seen[table] += 1
    config.hook.pytest_deselected(items=left)
    items[:] = chosen
