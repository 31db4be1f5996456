"""The official runtime finds our data after more than 2 and 4 GiB."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from serializer_sparse import write_huge

from lowerdeck_zoo import official

pytestmark = pytest.mark.skipif(not official.available(), reason=official.REASON)
GIB = 1 << 30


@pytest.mark.heavy
@pytest.mark.parametrize("filler", [2 * GIB + 100, 4 * GIB + 100])
def test_weight_behind_gigabytes(filler: int, tmp_path: Path) -> None:
    path, _ = write_huge(tmp_path, filler)
    outcome = official.run(path, [official.Call((torch.zeros(2, 3),))], timeout=300.0)
    assert isinstance(outcome, official.Ran), outcome
    weight = torch.frombuffer(bytearray(range(24)), dtype=torch.float32).reshape(2, 3)
    assert torch.equal(outcome.outputs[0][0], torch.zeros(2, 3) + weight)
