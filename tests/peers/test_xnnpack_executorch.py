"""The XNNPACK backend beside ExecuTorch's own: delegates, what is left to others, size."""

from __future__ import annotations

import pytest

from benchmarks.harness import told_by

pytestmark = pytest.mark.heavy  # ExecuTorch takes half a minute to lower a small transformer


@pytest.mark.parametrize("model", ["cnn", "decoder", "mobilenet"])
def test_no_more_delegates_no_more_left_and_no_larger_file(model: str) -> None:
    steps = ("export", "ours", "peer")
    _, ours, peer = (told_by("-m", "benchmarks.xnnpack_files", one, model, "raw") for one in steps)
    assert ours["delegates"] <= peer["delegates"]
    assert sum(ours["left"].values()) <= sum(peer["left"].values())
    assert ours["size"] <= peer["size"]
