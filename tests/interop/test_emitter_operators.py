"""A sample of ATen operators in other dtypes and forms of memory: right, or refused.

``nox -s conformance`` runs all of them.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

pytest.importorskip("expecttest", reason="torch's own test data asks for it")

from tests.conformance.forms import verdicts
from tests.conformance.known import KNOWN
from tests.conformance.samples import ALL_DTYPES, operators

GROUPS, SAMPLES, SEED = 40, 2, 3

SAMPLE = random.Random(SEED).sample(
    [one for one in operators(ALL_DTYPES) if one[0] not in KNOWN], GROUPS
)


@pytest.mark.parametrize(("info", "dtype"), [pytest.param(i, d, id=n) for n, i, d in SAMPLE])
def test_an_operator_is_right_or_refused(info: Any, dtype: torch.dtype) -> None:
    found = verdicts(info, dtype, SEED, SAMPLES)
    faults = [f"{told}: {verdict}" for verdict, told in found if verdict.startswith("fault")]
    assert not faults, "\n".join(faults)
