"""A pytest plugin that runs the Python blocks of every Markdown page, each page as one program.

A block that must not be run (a fragment, a transcript) is fenced as ``text`` or ``sh``.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

_folders: list[tempfile.TemporaryDirectory[str]] = []
_home = os.getcwd()  # noqa: PTH109  (os.chdir takes it back as it is)


def _enter(_namespace: dict[str, Any]) -> None:
    folder = tempfile.TemporaryDirectory()
    _folders.append(folder)
    os.chdir(folder.name)


def _leave(_namespace: dict[str, Any]) -> None:
    os.chdir(_home)
    _folders.pop().cleanup()


def pytest_configure(config: pytest.Config) -> None:
    """Let torch's own warning about its own specs pass; every other one is an error."""
    # torch.export copies specs deeply when a page calls run_decompositions itself.
    config.addinivalue_line(
        "filterwarnings", "ignore:.*isinstance.treespec, LeafSpec:FutureWarning"
    )


pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser()],
    # Without a path Sybil looks only below the folder of this file.
    path=_home,
    patterns=["*.md"],
    setup=_enter,
    teardown=_leave,
).pytest()
