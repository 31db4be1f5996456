"""Settings of this package's tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

# Tests import what they share by its plain name, from the sources and from a copy of this
# folder alike.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
