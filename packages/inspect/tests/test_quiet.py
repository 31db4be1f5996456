"""Warnings of torch and torchao are suppressed while a command runs."""

from __future__ import annotations

import logging
import sys
import warnings
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from lowerdeck.inspect import command_line

NOISY = """
import logging
import warnings

warnings.warn("Failed to initialize NumPy: No module named 'numpy'")
logging.getLogger("torchao").warning("Failed to load a library for CUDA")
warnings.warn("this one is for users")


class Noisy:
    help = "warn, and log"

    def configure(self, parser):
        parser.add_argument("--told", action="store_true")

    def run(self, args):
        logging.getLogger("torch.utils._pytree").warning("deprecated")
        logging.getLogger("torchao").error("an error is told")
        print("done")
        return 0


noisy = Noisy()
"""


@pytest.mark.parametrize("debug", [False, True])
def test_a_command_is_answered_without_them_but_for_debug(
    debug: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "noisy_command.py").write_text(NOISY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "noisy_command", raising=False)
    entry = EntryPoint("noisy", "noisy_command:noisy", command_line.GROUP)
    monkeypatch.setattr(command_line, "installed_entries", lambda group: [entry])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert command_line.main(["noisy", *(["--debug"] if debug else [])]) == 0
    assert capsys.readouterr().out == "done\n"
    told = [str(one.message) for one in warned]
    assert "this one is for users" in told
    assert any("NumPy" in one for one in told) == debug
    assert "an error is told" in caplog.messages
    assert ("Failed to load a library for CUDA" in caplog.messages) == debug
    assert ("deprecated" in caplog.messages) == debug
    assert logging.getLogger("torchao").level == logging.NOTSET
