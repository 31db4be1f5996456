"""What all tests of this package share."""

from __future__ import annotations

import pytest

TORCH_COPIES_TREE_SPECS = r"ignore:.isinstance\(treespec, LeafSpec\).:FutureWarning"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # torch itself copies tree specs in run_decompositions, and warns of its own code.
    for item in items:
        item.add_marker(pytest.mark.filterwarnings(TORCH_COPIES_TREE_SPECS))
