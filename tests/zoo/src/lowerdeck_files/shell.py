"""A fixture that runs the command ``lowerdeck`` in this process, as a user does in a shell."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest


class Printed(NamedTuple):
    """The exit status of a command, and what it printed to both streams."""

    status: int
    out: str
    err: str


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Callable[..., Printed]:
    """Return a function that runs ``lowerdeck`` with some words and checks its exit status."""
    # Here: the zoo itself depends on torch alone.
    from lowerdeck.script import main

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
