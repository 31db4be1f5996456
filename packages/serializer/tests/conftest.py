"""Lets the tests import the modules of this folder, wherever the folder was copied to."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from lowerdeck.script import main


class Printed(NamedTuple):
    """The exit status of a command, and what it printed to both streams."""

    status: int
    out: str
    err: str


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Callable[..., Printed]:
    """Return a function that runs ``lowerdeck`` with some words and checks its exit status."""

    def run(*words: object, status: int | None = 0) -> Printed:
        capsys.readouterr()
        try:
            ended = main(list(map(str, words)))
        except SystemExit as stop:
            ended = int(stop.code or 0)
        printed = Printed(ended, *capsys.readouterr())
        assert status in (None, ended), printed.err
        return printed

    return run
