"""The XNNPACK backend beside ExecuTorch's own: delegates, what is left to others, size."""

from __future__ import annotations

import pytest

from benchmarks import bench_xnnpack, workers

pytestmark = pytest.mark.heavy  # ExecuTorch takes half a minute to lower a small transformer


@pytest.mark.parametrize("model", workers.MODELS)
def test_no_more_delegates_no_more_left_and_no_larger_file(model: str) -> None:
    rows = {row.case: row for row in bench_xnnpack.lowering_rows(model)}
    for what in ("delegates", "calls left to other kernels", "size of the file"):
        row = rows[f"{model}: {what}"]
        assert row.met, row
