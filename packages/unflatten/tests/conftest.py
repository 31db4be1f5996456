"""Settings of this package's tests."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from lowerdeck_zoo.seeds import keep_todays

# Tests import what they share by its plain name, from the sources and from a copy of this
# folder alike.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run a third of the cases of long tables; at night, and for a release, all."""
    cases = Counter(item.nodeid.partition("[")[0] for item in items)
    keep_todays(config, items, lambda item: 3 if cases[item.nodeid.partition("[")[0]] > 8 else 1)
