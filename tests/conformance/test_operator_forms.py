"""Every operator in every dtype, form of memory and place is right, or refused."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lowerdeck_zoo import official
from tests.conformance.forms import verdicts
from tests.conformance.known import KNOWN
from tests.conformance.samples import ALL_DTYPES, operators

SAMPLES = 8
COUNTS: collections.Counter[str] = collections.Counter()

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not official.available(), reason=official.REASON),
]


@pytest.fixture(scope="module", autouse=True)
def _totals() -> Iterator[None]:
    """Print how many samples ended how."""
    yield
    print("\nforms:", dict(COUNTS))


@pytest.mark.parametrize(
    ("name", "info", "dtype"), [pytest.param(n, i, d, id=n) for n, i, d in operators(ALL_DTYPES)]
)
def test_operator_is_right_or_refused_in_every_form(
    name: str, info: Any, dtype: torch.dtype
) -> None:
    found = verdicts(info, dtype, 0, SAMPLES)
    COUNTS.update(verdict.partition(":")[0] for verdict, _ in found)
    faults = [f"{told}: {verdict}" for verdict, told in found if verdict.startswith("fault")]
    assert not faults or name in KNOWN, "\n".join(faults)
