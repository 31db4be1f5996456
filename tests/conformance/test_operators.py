"""Every operator sample of torch's own test data: right in the official runtime, or refused.

A sample may be refused with the emitter's own error, or be what torch cannot export. What then
runs must equal eager: as torch has the samples, and in every dtype, form of memory and place.
Differences that are the kernel's own fault stand, with their reason, in
``known_differences.toml``; an entry that no longer differs must be removed.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lowerdeck_zoo import official
from tests.conformance.forms import verdicts
from tests.conformance.known import DIFFERS, KNOWN
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
    print("\nconformance:", dict(COUNTS))


def _faults(info: Any, dtype: torch.dtype, count: int | None) -> list[str]:
    found = verdicts(info, dtype, 0, count)
    COUNTS.update(verdict.partition(":")[0] for verdict, _ in found)
    return [f"{told}: {verdict}" for verdict, told in found if verdict.startswith("fault")]


@pytest.mark.parametrize(
    ("name", "info", "dtype"), [pytest.param(n, i, d, id=n) for n, i, d in operators()]
)
def test_operator_is_right_or_refused(name: str, info: Any, dtype: torch.dtype) -> None:
    faults = _faults(info, dtype, None)
    if name in DIFFERS:
        assert faults, f"{name} is right now: remove it from known_differences.toml"
    else:
        assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("name", "info", "dtype"), [pytest.param(n, i, d, id=n) for n, i, d in operators(ALL_DTYPES)]
)
def test_operator_is_right_or_refused_in_every_form(
    name: str, info: Any, dtype: torch.dtype
) -> None:
    faults = _faults(info, dtype, SAMPLES)
    assert not faults or name in KNOWN, "\n".join(faults)
