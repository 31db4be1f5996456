"""Measure this project against its peers in one run: CPU time, memory, ratios, growth.

A shared machine drifts, so a figure is worth little and a ratio of two figures taken in turn is
worth much: ``paired`` runs A B A B ... and compares the least CPU time of each. Load only ever
adds to a time (caches are shared), so the least of some runs is the steadiest figure there is; and
where even that is too unsteady to judge growth, ``count_calls`` counts what was done.
"""

from __future__ import annotations

import fnmatch
import gc
import json
import math
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]

# Not ru_maxrss: a process inherits that figure from the one that started it. VmHWM starts anew.
_PRINT_PEAK = (
    "with open('/proc/self/status') as _status:\n"
    "    print('PEAK_KB', next(l for l in _status if l.startswith('VmHWM')).split()[1])"
)

_ENOUGH = 20.0
"""Seconds of one comparison, after which its rounds end."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the results table.

    Attributes:
        package: Import name of the package, such as ``"serializer"``.
        case: What was measured, with its size, in words a user understands.
        ours: Our figure, in ``unit``.
        peer: The peer's figure in the same unit, or None where there is no peer.
        unit: ``"s"``, ``"MB"``, ``"us/node"``, ``"exponent"``, ...
        goal: The goal in words, such as ``">= 10x faster"``; empty when there is none.
        met: Whether the goal was met; None when there is none.
        note: What a reader must know, such as who the peer is.
    """

    package: str
    case: str
    ours: float
    peer: float | None = None
    unit: str = "s"
    goal: str = ""
    met: bool | None = None
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Return how many times better we are: less is better but for shares that are right."""
        less, more = (self.peer, self.ours) if "right" in self.unit else (self.ours, self.peer)
        return None if less is None or more is None or less <= 0 else more / less


def cpu_seconds(action: Callable[[], object], *, repeat: int = 3) -> float:
    """Return the least CPU time of ``action`` in seconds over ``repeat`` runs."""
    return min(_once(action) for _ in range(repeat))


def in_rounds(measures: Sequence[Callable[[], float]], *, repeat: int = 3) -> list[float]:
    """Return the least that each measure gave, all of them taken in turn, again and again.

    A slow minute of the machine then falls on every size of a series, not on one. After
    ``_ENOUGH`` seconds there are no further rounds: drift matters little for what takes so long.
    """
    rounds: list[list[float]] = []
    start = time.perf_counter()
    while len(rounds) < repeat and (not rounds or time.perf_counter() - start < _ENOUGH):
        rounds.append([measure() for measure in measures])
    return [min(figures) for figures in zip(*rounds, strict=True)]


def paired(
    ours: Callable[[], object], peer: Callable[[], object], *, repeat: int = 3
) -> tuple[float, float]:
    """Return the least CPU seconds of both actions, run in turn."""
    mine, theirs = in_rounds([lambda: _once(ours), lambda: _once(peer)], repeat=repeat)
    return mine, theirs


def median_ratio(
    ours: Callable[[], object], peer: Callable[[], object], *, pairs: int = 40
) -> float:
    """Return the median of the ratios of both actions' CPU seconds, run in turn."""
    return statistics.median(_once(ours) / _once(peer) for _ in range(pairs))


def count_calls(action: Callable[[], object]) -> int:
    """Return how many functions ``action`` calls: a cost that no load can change."""
    calls = 0

    def profile(frame: FrameType, event: str, arg: object) -> None:  # noqa: ARG001
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(before)
    return calls


def growth_exponent(series: Iterable[tuple[float, float]]) -> float:
    """Return the least-squares slope of log(cost) over log(size): 1 is linear, 2 quadratic."""
    points = [(math.log(size), math.log(max(cost, 1e-9))) for size, cost in series]
    mean_x = statistics.fmean(x for x, _ in points)
    mean_y = statistics.fmean(y for _, y in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum(
        (x - mean_x) ** 2 for x, _ in points
    )


def fresh_process(code: str, *args: str, python: str = sys.executable) -> dict[str, float]:
    """Run ``code`` in a new interpreter; return its ``cpu`` s, ``peak_mb`` and ``wall`` s.

    What it prints as ``FIGURE name value`` is returned under that name.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    program = f"{code}\n{_PRINT_PEAK}"
    done = subprocess.run(
        [python, "-c", program, *args],
        check=True,
        capture_output=True,
        text=True,
        env=compiled_environment(),
    )
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    peak = next(line for line in reversed(done.stdout.splitlines()) if line.startswith("PEAK_KB"))
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    told = [line.split() for line in done.stdout.splitlines() if line.startswith("FIGURE ")]
    figures = {name: float(value) for _, name, value in told}
    return {"cpu": cpu, "peak_mb": int(peak.split()[1]) / 1024, "wall": wall, **figures}


def compiled_environment() -> dict[str, str]:
    """Return the environment of a process that finds our modules byte-compiled.

    Installed packages are; without that we would time the compiler.
    """
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    env["PYTHONPYCACHEPREFIX"] = str(Path(tempfile.gettempdir()) / "lowerdeck-bench-pycache")
    return env


def told_by(*words: object, one_core: bool = False, limit: int | None = None) -> Any:
    """Run Python with these words in a separate process; return the JSON of its last line.

    Args:
        words: A module after ``-m`` or code after ``-c``, and its arguments.
        one_core: Whether it runs on one core, before all others there.
        limit: The most CPU seconds that it may take.

    Raises:
        RuntimeError: It failed; the message ends with what it said.
    """

    def prepare() -> None:
        if one_core:
            on_one_core()
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))

    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        env=compiled_environment() | {"HF_HUB_OFFLINE": "1"},
        preexec_fn=prepare,
    )
    if done.returncode:
        if done.returncode == -signal.SIGXCPU:
            raise RuntimeError(f"it took more than {limit} s of CPU")
        told = done.stderr[-3000:].strip() or f"it ended with {done.returncode}"
        raise RuntimeError(f"{' '.join(map(str, words))[:100]} failed:\n{told}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def on_one_core() -> None:
    """Keep this process on one core, before all others there where that is allowed.

    For ``preexec_fn`` of processes that time what XNNPACK or OpenVINO computes.
    """
    # Both have a thread for each core that it may use.
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    with suppress(PermissionError):
        # Whoever may: no other process has a turn on that core while something is timed.
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


def _once(action: Callable[[], object]) -> float:
    gc.collect()  # whoever runs next must not pay for the garbage of whoever ran before
    start = time.process_time()
    action()
    return time.process_time() - start


def chosen(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """Return the names that fit a pattern, all without patterns.

    Args:
        names: What there is.
        patterns: As a shell has them, such as ``torchvision/*``.

    Raises:
        ValueError: One fits nothing.
    """
    names = list(names)
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ValueError(f"found {pattern!r}, expected some of {', '.join(names)}")
    return [
        name
        for name in names
        if not patterns or any(fnmatch.fnmatch(name, one) for one in patterns)
    ]
