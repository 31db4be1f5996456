"""Measure this project beside its peers in one run: CPU time, memory, ratios, growth.

A shared machine drifts, so a figure is worth little and a ratio of two figures taken in turn is
worth much: ``paired`` runs A B A B ... and compares medians of CPU time.
"""

from __future__ import annotations

import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# Not ru_maxrss: a process inherits that figure from the one that started it. VmHWM starts anew.
_PRINT_PEAK = (
    "with open('/proc/self/status') as _status:\n"
    "    print('PEAK_KB', next(l for l in _status if l.startswith('VmHWM')).split()[1])"
)


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
        series: ``(size, ours, peer)`` triples for a plot of growth.
    """

    package: str
    case: str
    ours: float
    peer: float | None = None
    unit: str = "s"
    goal: str = ""
    met: bool | None = None
    note: str = ""
    series: tuple[tuple[float, float, float | None], ...] = field(default=())

    @property
    def ratio(self) -> float | None:
        """Return peer / ours (above 1: we are better), or None without a peer."""
        return self.peer / self.ours if self.peer is not None and self.ours > 0 else None


def cpu_seconds(action: Callable[[], object], *, repeat: int = 3) -> float:
    """Return the median CPU time of ``action`` in seconds over ``repeat`` runs."""
    return statistics.median(_once(action) for _ in range(repeat))


def paired(
    ours: Callable[[], object], peer: Callable[[], object], *, repeat: int = 3
) -> tuple[float, float]:
    """Return the median CPU seconds of both actions, run in turn."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeat):
        times[0].append(_once(ours))
        times[1].append(_once(peer))
    return statistics.median(times[0]), statistics.median(times[1])


def growth_exponent(series: Iterable[tuple[float, float]]) -> float:
    """Return the least-squares slope of log(cost) over log(size): 1 is linear, 2 quadratic."""
    points = [(math.log(size), math.log(max(cost, 1e-9))) for size, cost in series]
    mean_x = statistics.fmean(x for x, _ in points)
    mean_y = statistics.fmean(y for _, y in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum(
        (x - mean_x) ** 2 for x, _ in points
    )


def fresh_process(code: str, *args: str, python: str = sys.executable) -> dict[str, float]:
    """Run ``code`` in a new interpreter; return its ``cpu`` s, ``peak_mb`` and ``wall`` s."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    program = f"{code}\n{_PRINT_PEAK}"
    # Installed packages are byte-compiled; without that we would time the compiler.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    env["PYTHONPYCACHEPREFIX"] = str(Path(tempfile.gettempdir()) / "lowerdeck-bench-pycache")
    done = subprocess.run(
        [python, "-c", program, *args], check=True, capture_output=True, text=True, env=env
    )
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    peak = next(line for line in reversed(done.stdout.splitlines()) if line.startswith("PEAK_KB"))
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cpu": cpu, "peak_mb": int(peak.split()[1]) / 1024, "wall": wall}


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of a Markdown table of ``rows``."""
    yield "| package | case | ours | peer | ratio | goal | met |"
    yield "|---|---|---:|---:|---:|---|---|"
    for row in rows:
        peer = "" if row.peer is None else f"{row.peer:.4g} {row.unit}"
        ratio = "" if row.ratio is None else f"{row.ratio:.3g}x"
        met = {None: "", True: "yes", False: "**no**"}[row.met]
        case = f"{row.case} ({row.note})" if row.note else row.case
        ours = f"{row.ours:.4g} {row.unit}"
        cells = (row.package, case, ours, peer, ratio, row.goal, met)
        yield f"| {' | '.join(cells)} |"


def _once(action: Callable[[], object]) -> float:
    start = time.process_time()
    action()
    return time.process_time() - start
