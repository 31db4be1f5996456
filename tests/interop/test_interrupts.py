"""Ctrl-C while a command imports ends it (130 in a shell), whatever it imports just then."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_answers import INTERRUPTING, interruptible

__all__ = ["interruptible"]

_MODEL = """
import torch
def made():
    return torch.nn.Linear(2, 2), (torch.ones(1, 2),)
"""


@pytest.mark.parametrize(
    ("command", "at"),
    [
        ("lower", "torch"),
        ("lower", "torch.export"),
        ("run", "numpy"),
        ("lm", "torch"),
    ],
)
def test_an_interrupt_while_a_command_imports(command: str, at: str, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(_MODEL)
    words = {
        "lower": ["lower", "model:made", "--backend", "XnnpackBackend"],
        "run": ["run", "no.pte"],
        "lm": ["lm", "--help"],
    }[command]
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTING, at, *words],
        capture_output=True,
        check=False,
        cwd=tmp_path,
        text=True,
    )
    assert done.returncode == -signal.SIGINT, done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("*.pte"))
