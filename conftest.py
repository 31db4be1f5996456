"""Give every test of the repository the same random numbers, whatever ran before it."""

import random
import sys

import pytest


@pytest.fixture(autouse=True)
def _seed() -> None:
    random.seed(0)
    # The serializer's tests run without torch.
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
