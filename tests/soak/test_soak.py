"""A first few hundred of the programs that ``nox -s soak`` runs by the thousand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lowerdeck_zoo import official
from lowerdeck_zoo.seeds import seeds
from tests.soak.check import ALL
from tests.soak.run import run_seed, summary, warm_up

pytestmark = pytest.mark.skipif(not official.available(), reason=official.REASON)
SEEDS, BLOCK = 300, 10


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    warm_up()


@pytest.mark.parametrize("start", [BLOCK * block for block in seeds(SEEDS // BLOCK)])
def test_raw_programs_equal_eager_or_are_refused(start: int) -> None:
    found = []
    for seed in range(start, start + BLOCK):
        # Emitting, and in turn one of the ways of lowering: all of them take too long for CI.
        found += run_seed(seed, (ALL[0], ALL[1 + seed % (len(ALL) - 1)]))
    assert not [one for one in found if one.outcome in ("wrong", "failed", "crashed")], summary(
        found
    )
