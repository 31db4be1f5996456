"""Say where the time from an exported program to bytes goes.

Run it as ``python -m benchmarks.export_profile``; it prints a table.


A profiler counts the time inside each function alone; calls of built-in functions that move or
digest the bytes of weights are told apart, for no compiler can leave them out.
"""

from __future__ import annotations

import cProfile
import pstats
import re
from collections import Counter
from collections.abc import Iterator

from benchmarks.export_models import MODELS
from benchmarks.export_to_bytes import EXPORT, OURS
from benchmarks.workers import worker

_PROFILED = """
from benchmarks.export_profile import shares
print(json.dumps(shares(lambda: make(exported))))
"""
_WEIGHTS = ("join", "sha256", "double", "contiguous", "float", "tobytes", "clone", "permute")
"""Built-in functions whose time is that of the bytes that they are given."""


def shares(action: object) -> dict[str, float]:
    """Return the seconds of a call by whose code they were spent in.

    Args:
        action: What to call, without arguments.
    """
    profile = cProfile.Profile()
    profile.runcall(action)  # type: ignore[arg-type]
    found: Counter[str] = Counter()
    stats: dict[tuple[str, int, str], tuple[int, int, float, float, object]]
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    for (file, _, name), (_, _, own, _, _) in stats.items():
        found[_owner(file, name)] += own
    return dict(found)


def _owner(file: str, name: str) -> str:
    if ours := re.search(r"/lowerdeck/(\w+)/", file):
        return ours[1]
    for package in ("torch", "sympy", "flatbuffers"):
        if f"/{package}/" in file:
            return "torch" if package == "sympy" else package
    if file == "~":
        return (
            "bytes of weights" if any(word in name for word in _WEIGHTS) else "built-in functions"
        )
    return "other Python"


def lines() -> Iterator[str]:
    """Yield a table in Markdown: a row for each model and way, a column for whose code it was."""
    rows = {
        (name, way): worker(EXPORT + OURS + _PROFILED, name, way)
        for name in MODELS
        for way in ("no backend", "XNNPACK")
    }
    columns = [name for name, _ in sum(map(Counter, rows.values()), Counter()).most_common()]
    yield f"| model | way | {' | '.join(columns)} |"
    yield f"|---|---|{'---:|' * len(columns)}"
    for (name, way), spent in rows.items():
        total = sum(spent.values())
        cells = (f"{100 * spent.get(column, 0) / total:.0f} %" for column in columns)
        yield f"| {name} | {way} | {' | '.join(cells)} |"


if __name__ == "__main__":
    print("\n".join(lines()))
