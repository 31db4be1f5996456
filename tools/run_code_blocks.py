"""A pytest plugin that runs the Python blocks of every Markdown page, each page as one program.

A block that must not be run (a fragment, a transcript) is fenced as ``text`` or ``sh``. The pages
of the tutorial have more that is held to what happens:

- a ``python`` block with a title is a file, and written as one;
- a ``text`` block titled "It prints" is what the Python before it prints;
- a ``console`` block is commands after ``$``, each with what it prints.

Numbers in what is printed may be others here; a line ``...`` stands for any number of lines. The
pages are followed in one folder, in their order, as a reader does.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from sybil import Example, Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.abstract.codeblock import AbstractCodeBlockParser
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser
from sybil.parsers.markdown.lexers import RawFencedCodeBlockLexer
from sybil.sybil import SybilCollection

_folders: list[tempfile.TemporaryDirectory[str]] = []
_home = os.getcwd()  # noqa: PTH109  (os.chdir takes it back as it is)
_TUTORIAL = "docs/tutorial/*.md"
_tutorial: list[tempfile.TemporaryDirectory[str]] = []
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:,\d+)*(?:\.\d+)?(?:e[-+]?\d+)?")
_FOLDER = re.compile(r'"/\S+/(?=\w+\.py")')
_run_python = PythonEvaluator()


def _enter(_namespace: dict[str, Any]) -> None:
    folder = tempfile.TemporaryDirectory()
    _folders.append(folder)
    os.chdir(folder.name)


def _leave(_namespace: dict[str, Any]) -> None:
    os.chdir(_home)
    _folders.pop().cleanup()


def _go_on(_namespace: dict[str, Any]) -> None:
    if not _tutorial:
        _tutorial.append(tempfile.TemporaryDirectory())
    os.chdir(_tutorial[0].name)
    sys.path.insert(0, _tutorial[0].name)


def _pause(_namespace: dict[str, Any]) -> None:
    os.chdir(_home)
    sys.path.remove(_tutorial[0].name)


class _Blocks(AbstractCodeBlockParser):
    """Blocks of a language, with or without a title."""

    def __init__(self, language: str, title: str = "") -> None:
        quoted = f' title="(?P<title>{title})"' if title else ""
        info = re.compile(rf"(?P<arguments>{language}){quoted}$\n", re.MULTILINE)
        super().__init__([RawFencedCodeBlockLexer(info)], language)


class _Files(_Blocks):
    def evaluate(self, example: Example) -> str | None:
        Path(example.region.lexemes["title"]).write_text(str(example.parsed), encoding="utf-8")
        return None


class _Python(_Blocks):
    def evaluate(self, example: Example) -> str | None:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            _run_python(example)
        example.namespace["printed"] = printed.getvalue()
        return None


class _Printed(_Blocks):
    def evaluate(self, example: Example) -> str | None:
        return _objection(str(example.parsed), example.namespace["printed"])


class _Console(_Blocks):
    def evaluate(self, example: Example) -> str | None:
        folder = Path(sys.executable).parent
        environment = os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
        for part in re.split(r"^\$ ", str(example.parsed), flags=re.M)[1:]:
            command, _, told = part.partition("\n")
            run = subprocess.run(
                command, shell=True, capture_output=True, text=True, env=environment, check=False
            )
            # Files that differ are what `diff` is for.
            if run.returncode != ("diff" in command.split()):
                return f"$ {command}\nended with {run.returncode}: {run.stderr}"
            if objection := _objection(told, run.stdout):
                return f"$ {command}\n{objection}"
        return None


def _objection(told: str, printed: str) -> str | None:
    """Return what is wrong with what a page tells of an output, or None."""
    pattern = "".join(
        r"(?:.*\n)*" if line == "..." else re.escape(line).replace(r"\.\.\.", ".*") + "\n"
        for line in _plain(told).splitlines()
    )
    if re.fullmatch(pattern, f"{_plain(printed)}\n"):
        return None
    return f"the page tells\n{told}\nand what is printed is\n{printed}"


def _plain(text: str) -> str:
    """Return lines without what is other elsewhere: numbers, bars, folders, spaces."""
    text = _FOLDER.sub('"', text)
    lines = (_NUMBER.sub("#", line).rstrip(" █") for line in text.strip().splitlines())
    return "\n".join(" ".join(line.split()) for line in lines)


def pytest_configure(config: pytest.Config) -> None:
    """Let torch's own warning about its own specs pass; every other one is an error."""
    # torch.export copies specs deeply when a page calls run_decompositions itself.
    config.addinivalue_line(
        "filterwarnings", "ignore:.*isinstance.treespec, LeafSpec:FutureWarning"
    )


_pages = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser()],
    # Without a path Sybil looks only below the folder of this file.
    path=_home,
    patterns=["*.md"],
    excludes=[_TUTORIAL],
    setup=_enter,
    teardown=_leave,
)
_tutorial_pages = Sybil(
    parsers=[
        _Files("python", r"[\w.]+"),
        _Python("python"),
        _Printed("text", "It prints"),
        _Console("console"),
    ],
    path=_home,
    patterns=[_TUTORIAL],
    setup=_go_on,
    teardown=_pause,
)
pytest_collect_file = SybilCollection([_pages, _tutorial_pages]).pytest()
