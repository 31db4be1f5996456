"""Ctrl-C at any moment of any command: one line and 130, whatever it imports just then."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# As in the tests of the serializer: the interrupt comes when the module begins to be imported.
_INTERRUPTING = """
import os, signal, sys
at, sys.argv = sys.argv[1], ["lowerdeck", *sys.argv[2:]]
class Finder:
    def find_spec(self, name, *_):
        if name == at:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
from lowerdeck.script import main
sys.exit(main())
"""
_MODEL = """
import torch
def made():
    return torch.nn.Linear(2, 2), (torch.ones(1, 2),)
"""


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """Take Ctrl-C as in a terminal: processes that are started in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("command", "at"),
    [
        ("lower", "torch"),
        ("lower", "torch.export"),
        ("lower", "lowerdeck.xnnpack"),
        ("run", "numpy"),
        ("lm", "torch"),
        ("backends", "numpy._core._multiarray_umath"),
    ],
)
def test_an_interrupt_while_a_command_imports(command: str, at: str, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(_MODEL)
    words = {
        "lower": ["lower", "model:made", "--backend", "XnnpackBackend"],
        "run": ["run", "no.pte"],
        "lm": ["lm", "--help"],
        "backends": ["backends"],
    }[command]
    done = subprocess.run(
        [sys.executable, "-c", _INTERRUPTING, at, *words],
        capture_output=True,
        check=False,
        cwd=tmp_path,
        text=True,
    )
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    # Before it, torchao may tell at length what it lacks here.
    assert done.stderr.splitlines()[-1] == f"lowerdeck {command}: interrupted"
    assert not list(tmp_path.glob("*.pte"))
