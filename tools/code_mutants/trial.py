"""One run of tests in a process of its own, on the sources or on a mutant of them.

cosmic-ray's own runner writes each mutant over the file in the working tree and starts Python
anew, which here is seconds of importing torch and all tests for each. A fork has torch already,
imports the mutant from memory, and runs only those tests that reach the changed statement.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import os
import signal
import sys
import time
import traceback
import types
from collections.abc import Callable, Generator, Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path

import coverage
import hypothesis
import pytest

Reach = dict[str, dict[int, list[str]]]
"""By file and line: the tests that run it."""


def in_child(job: Callable[[], int], seconds: float, log: Path) -> int | None:
    """Run a job in a fork, which need not import torch again; return what it returns.

    What it prints goes to ``log``. None: it was still running after ``seconds``.
    """
    child = os.fork()
    if child == 0:
        os.setsid()
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        try:
            status = job()
        except BaseException:
            traceback.print_exc()
            status = 255
        sys.stdout.flush()
        os._exit(status)
    end = time.monotonic() + seconds
    ended: int | None = None
    try:
        while ended is None and time.monotonic() < end:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                ended = os.waitstatus_to_exitcode(status)
            else:
                time.sleep(0.05)
    finally:
        # It has a session of its own, so that Ctrl-C ends this process alone.
        if ended is None:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return ended


def run_tests(files: Sequence[str], plugin: object, *options: str) -> int:
    """Run pytest in this process; the same examples are drawn in each run."""
    hypothesis.settings.register_profile("mutants", derandomize=True, database=None)
    hypothesis.settings.load_profile("mutants")
    # pytest would say of each fork that hypothesis came before it, and we make warnings errors.
    known = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
    fixed = ("-q", "-p", "no:cacheprovider", "-W", known)
    return int(pytest.main([*fixed, *options, *files], plugins=[plugin]))


class Chosen:
    """Keeps the tests that can reach a mutant, the shortest first."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Called by pytest with all that it found."""
        kept = [item for item in items if item.nodeid in self.seconds]
        items[:] = sorted(kept, key=lambda item: self.seconds[item.nodeid])


class Watcher:
    """Notes which lines each test runs, and how long it takes."""

    def __init__(self, sources: Sequence[Path]) -> None:
        self.seconds: dict[str, float] = {}
        self.failed: list[str] = []
        self.coverage = coverage.Coverage(
            data_file=None, include=[str(path) for path in sources], config_file=False
        )

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Called by pytest around each test."""
        began = time.perf_counter()
        self.coverage.switch_context(item.nodeid)
        done = yield
        self.coverage.switch_context("")
        self.seconds[item.nodeid] = time.perf_counter() - began
        return done

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called by pytest with what came of each test."""
        if report.failed:
            self.failed.append(report.nodeid)

    def reach(self) -> Reach:
        """Return which tests ran each line."""
        data = self.coverage.get_data()
        return {
            path: {
                line: sorted(filter(None, names))
                for line, names in data.contexts_by_lineno(path).items()
            }
            for path in data.measured_files()
        }


class Replaced(MetaPathFinder):
    """Imports one module from a changed text, whatever stands in its file and in caches."""

    def __init__(self, path: Path, source: str) -> None:
        below_src = str(path.with_suffix("")).rpartition("/src/")[2]
        self.name = below_src.replace("/", ".").removesuffix(".__init__")
        self.path, self.source = path, source

    def find_spec(
        self, fullname: str, _path: object = None, _target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Called by the import system for every module."""
        if fullname != self.name:
            return None
        loader = _Loader(fullname, str(self.path))
        loader.code = compile(self.source, str(self.path), "exec")
        return importlib.util.spec_from_file_location(fullname, self.path, loader=loader)


class _Loader(importlib.machinery.SourceFileLoader):
    code: types.CodeType

    def get_code(self, _fullname: str) -> types.CodeType:
        return self.code


def statement_lines(path: Path, line: int) -> range | None:
    """Return the lines of the statement, or of its head, in which ``line`` stands.

    None: it runs when the module is imported, not in a test.
    """
    inside = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    if not inside:
        return None  # A decorator: its line is before that of the function.
    statement = max(inside, key=lambda node: node.lineno)
    functions = [node for node in inside if isinstance(node, ast.FunctionDef)]
    last = statement.end_lineno or statement.lineno
    body = getattr(statement, "body", None)
    if body:
        last = max(statement.lineno, body[0].lineno - 1)
    if not functions or (statement is functions[-1]):
        return None
    return range(statement.lineno, last + 1)


def preload(*modules: str) -> None:
    """Import what every trial needs, once; nothing of ours, which may be changed."""
    for module in modules:
        importlib.import_module(module)
    assert not any(name.startswith("lowerdeck") for name in sys.modules)
