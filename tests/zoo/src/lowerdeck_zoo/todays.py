"""A pytest plugin for CI: of long tables a share by the date of the commit.

``pytest -p lowerdeck_zoo.todays`` runs all of up to 15 cases, and every other of more.
"""

from __future__ import annotations

from collections import Counter

import pytest

from lowerdeck_zoo.seeds import today


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Called by pytest with all collected tests."""
    cases = Counter(item.nodeid.partition("[")[0] for item in items)
    seen = Counter[str]()
    chosen: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for item in items:
        table = item.nodeid.partition("[")[0]
        every = 1 if cases[table] < 16 else 2
        (left if (seen[table] + today()) % every else chosen).append(item)
        seen[table] += 1
    config.hook.pytest_deselected(items=left)
    items[:] = chosen
