"""Let the tests of this folder import ``tests.interop.official`` wherever pytest is started."""

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.interop import official


def pytest_report_header() -> str:
    """Say which runtime judges, and beside which torch."""
    binding = official.binding_name()
    if binding is None:
        return f"official runtime: none; {official.REASON}"
    try:
        release = version("executorch")
    except PackageNotFoundError:
        release = "of unknown version"
    return f"official runtime: executorch {release} ({binding}), torch {version('torch')}"
