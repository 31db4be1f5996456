"""Kernels with arguments that no compiler writes: an error or a result, never a dead process."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("hostile_kernels.py")


def search(trials: int, seed: int, *kernels: str) -> dict[str, Any]:
    words = [sys.executable, "-W", "ignore", str(SCRIPT), str(trials), str(seed), *kernels]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def crashed(found: dict[str, Any]) -> list[Any]:
    """Return what died; 14 is our own alarm: a file may ask for as much time as it likes."""
    return [entry for entry in found["crashed"] if entry[2] != 14]


@pytest.mark.parametrize("trials", [10, pytest.param(3000, marks=pytest.mark.heavy)])
def test_no_kernel_kills_the_process(trials: int) -> None:
    found = search(trials, 0)
    assert found["calls"] > 180 * trials
    assert crashed(found) == []


def test_kernels_that_trust_their_arguments_have_guards() -> None:
    kernels = "aten::_fft_r2c.out", "aten::_fft_c2r.out", "aten::_pdist_forward.out"
    assert crashed(search(80, 1000, *kernels)) == []
