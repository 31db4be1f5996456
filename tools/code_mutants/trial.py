"""One run of tests in a separate process, on the sources or on a mutant of them.

cosmic-ray's own runner writes each mutant over the file in the working tree and starts Python
anew, which here is seconds of importing torch and all tests for each. A fork has torch already,
imports the mutant from memory, and runs only those tests that reach the changed statement.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import signal
import sys
import time
import traceback
import types
from collections.abc import Callable, Generator, Mapping, Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path

import coverage
import hypothesis
import pytest

Reach = dict[str, list[str]]
"""By mutant: the tests that run its statement."""


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
    """Keep the tests that can reach a mutant, the fastest first, within a total of seconds."""

    def __init__(self, seconds: dict[str, float], longest: float) -> None:
        self.seconds, self.longest = seconds, longest

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Called by pytest with all collected tests."""
        reaching = [item for item in items if item.nodeid in self.seconds]
        reaching.sort(key=lambda item: self.seconds[item.nodeid])
        total, kept = 0.0, list[pytest.Item]()
        for item in reaching:
            total += self.seconds[item.nodeid]
            if total > self.longest and kept:
                break
            kept.append(item)
        items[:] = kept


class Watcher:
    """Record which lines each test runs, and how long it takes."""

    def __init__(self, sources: Sequence[str]) -> None:
        self.seconds: dict[str, float] = {}
        self.failed: list[str] = []
        self._coverage = coverage.Coverage(data_file=None, include=sources, config_file=False)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Called by pytest around each test."""
        began = time.perf_counter()
        self._coverage.switch_context(item.nodeid)
        done = yield
        self._coverage.switch_context("")
        self.seconds[item.nodeid] = time.perf_counter() - began
        return done

    def pytest_sessionstart(self) -> None:
        """Called by pytest before it collects."""
        self._coverage.start()

    def pytest_sessionfinish(self) -> None:
        """Called by pytest after the last test."""
        self._coverage.stop()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called by pytest with the outcome of each test."""
        if report.failed:
            self.failed.append(report.nodeid)

    def reach(self, lines: Mapping[str, Mapping[str, Sequence[int] | None]]) -> Reach:
        """Return the tests that run some line of each mutant.

        Args:
            lines: By file and mutant: the lines of its statement.
        """
        data = self._coverage.get_data()
        reach: Reach = {}
        for path, mutants in lines.items():
            contexts = data.contexts_by_lineno(path)
            for identity, numbers in mutants.items():
                tests = {test for number in numbers or () for test in contexts.get(number, ())}
                reach[identity] = sorted(filter(None, tests))
        return reach


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


def preload(root: Path, *modules: str) -> None:
    """Import what every trial needs once, and make the packages of ``root`` the ones that run."""
    os.chdir(root)
    sources = [str(path) for path in sorted(root.glob("packages/*/src"))]
    sys.path[:0] = [*sources, str(root)]
    os.environ["PYTHONPATH"] = os.pathsep.join([*sources, str(root)])
    for module in modules:
        importlib.import_module(module)
    assert not any(name.startswith("lowerdeck") for name in sys.modules)
