"""Settings of this package's tests."""

from __future__ import annotations

import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch

# Tests import what they share by its plain name, from the sources and from a copy of this
# folder alike.
sys.path.insert(0, str(Path(__file__).parent))

from new_contract import NEW_CONTRACT  # type: ignore[import-not-found]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Expect failures of the cases in which the code differs from the contract."""
    for item in items:
        test = item.nodeid.rpartition("/")[2].replace("[", "(").replace("]", ")")
        for pattern, reason in NEW_CONTRACT.items():
            if fnmatchcase(test, pattern):
                item.add_marker(pytest.mark.xfail(reason=reason, strict=False))
