"""Let the tests of this folder import others of ``tests`` wherever pytest is started."""

import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# Helpers of packages are in folders that are no packages.
sys.path.extend(map(str, Path(__file__).resolve().parents[2].glob("packages/*/tests")))

from payload_moves import payloads_have_no_mergeable_moves

from lowerdeck_files.shell import shell
from lowerdeck_zoo import official

__all__ = ["payloads_have_no_mergeable_moves", "shell"]


def pytest_report_header() -> str:
    """Name the runtime that judges, and the torch."""
    binding = official.binding_name()
    if binding is None:
        return f"official runtime: none; {official.REASON}"
    try:
        release = version("executorch")
    except PackageNotFoundError:
        release = "of unknown version"
    return f"official runtime: executorch {release} ({binding}), torch {version('torch')}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip this folder without the runtime; warnings of torch and torchao do not matter here.

    ``LOWERDECK_EVERY=10`` runs every tenth test.
    """
    items[:] = items[:: int(os.environ.get("LOWERDECK_EVERY", "1"))]
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.skipif(not official.available(), reason=official.REASON))
            item.add_marker(pytest.mark.filterwarnings("ignore"))
