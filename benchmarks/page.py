"""Write the results page: when and under what load, the headlines, and where peers are ahead."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from benchmarks.harness import Row
from benchmarks.records import Record

MOST = 40
"""Rows of the page; all others stay in the records."""
_LEVEL = 0.97
"""Ratios above this are level within the noise of a run."""


def page(records: Sequence[Record]) -> Iterator[str]:
    """Yield the lines of the results page.

    Args:
        records: What was measured, one of each package.
    """
    rows = [row for record in records for row in record.rows]
    met = [row.met for row in rows if row.met is not None]
    best = [row for record in records for row in _headlines(record)]
    families = list(_families(rows))
    behind = sorted(
        (row for row in rows if row.ratio is not None and row.ratio < _LEVEL),
        key=lambda row: row.ratio or 0,
    )
    yield "# Benchmark results"
    yield ""
    yield (
        "Ours and the peer were measured in turn in the same run; above 1 means ours is better."
        " Times are CPU time, the least of some runs, unless a row says otherwise. All rows are in"
        " `benchmarks/records`; these are the headlines, the families of models, and what a peer"
        " does better."
    )
    yield ""
    yield from dict.fromkeys(
        f"{record.machine}, {record.cores} cores, {record.versions}." for record in records
    )
    yield ""
    yield from _circumstances(records)
    yield f"{sum(met)} of {len(met)} goals are met."
    yield ""
    yield from table(best)
    yield ""
    yield "## By model family"
    yield ""
    yield "Run time of files, beside the peer's file of the same model."
    yield ""
    yield "| backend | models | files | peer's time / ours, median | least |"
    yield "|---|---|---:|---:|---:|"
    yield from families
    yield ""
    yield "## Where we are not ahead"
    yield ""
    compared = sum(row.ratio is not None for row in rows)
    yield f"{len(behind)} of {compared} comparisons are lost by more than 3 %, the worst first:"
    yield ""
    yield from table(behind[: MOST - len(best) - len(families)])


def _headlines(record: Record) -> list[Row]:
    """Return the first row with a peer, and what sums up many rows."""
    first = [row for row in record.rows if row.peer is not None][:1]
    totals = [row for row in record.rows if row.case.startswith(("median of", "swaps, all"))]
    return [*first, *(row for row in totals if row not in first)]


def _families(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line for the run times of each backend on the models of each library."""
    ratios: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        kind, _, model = row.case.partition(" ")
        if kind in ("run", "dynamic") and "/" in model and row.ratio:
            family = model.partition("/")[0] + ("" if kind == "run" else ", dynamic sizes")
            ratios.setdefault((row.package, family), []).append(row.ratio)
    for (package, family), found in sorted(ratios.items()):
        middle = statistics.median(found)
        yield f"| {package} | {family} | {len(found)} | {middle:.2f} | {min(found):.2f} |"


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of a Markdown table of ``rows``."""
    yield "| package | case | ours | peer | ratio | goal | met |"
    yield "|---|---|---:|---:|---:|---|---|"
    for row in rows:
        peer = "" if row.peer is None else _figure(row.peer, row.unit)
        ratio = "" if row.ratio is None else f"{row.ratio:.3g}x"
        met = {None: "", True: "yes", False: "**no**"}[row.met]
        case = f"{row.case} ({row.note})" if row.note else row.case
        cells = (row.package, case, _figure(row.ours, row.unit), peer, ratio, row.goal, met)
        yield f"| {' | '.join(cells)} |"


def _figure(value: float, unit: str) -> str:
    return f"{value:.4g} {unit}".strip()


def _circumstances(records: Sequence[Record]) -> Iterator[str]:
    yield "| record | measured (UTC) | minutes | load before | load after | by |"
    yield "|---|---|---:|---:|---:|---|"
    for record in records:
        why = "" if record.finished else f"; did not finish: {record.error or 'cut short'}"
        yield (
            f"| {record.package} | {record.started} | {record.wall / 60:.1f}"
            f" | {record.load_before:.1f} | {record.load_after:.1f} | `{record.command}`{why} |"
        )
    yield ""
