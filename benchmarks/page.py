"""Write the results as a page: when and under what load, and the table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.harness import Row
from benchmarks.records import Record


def page(records: Sequence[Record]) -> Iterator[str]:
    """Yield the lines of the results page.

    Args:
        records: What was measured, one of each package.
    """
    yield "# Benchmark results"
    yield ""
    yield from _circumstances(records)
    for record in records:
        if not record.finished:
            why = f" ({record.error})" if record.error else ""
            yield f"**{record.package} did not finish{why}: not all its rows are here.**"
            yield ""
    rows = [row for record in records for row in record.rows]
    met = [row.met for row in rows if row.met is not None]
    yield f"{sum(met)} of {len(met)} goals are met; the others are marked **no**."
    yield ""
    yield from table(rows)
    yield from _behind(rows)


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
    commands = list(dict.fromkeys(record.command for record in records))
    spent = sum(record.wall for record in records)
    many = (
        f"{len(commands)} calls, as the table tells" if len(commands) > 1 else f"`{commands[0]}`"
    )
    yield f"Made by {many}, in {spent / 60:.0f} minutes of measuring."
    yield from dict.fromkeys(
        f"{record.machine}, {record.cores} cores, {record.versions}." for record in records
    )
    yield (
        "Ours and the peer were measured in turn in the same run; above 1 means ours is better."
        " Times are CPU time, the least of some runs, unless a row says otherwise."
    )
    yield ""
    yield (
        "Load is the average number of busy processes over the last minute, before the first row"
        " and after the last; the benchmark itself is one of them."
        " What exceeds the cores were others at work."
    )
    yield ""
    yield "| package | measured (UTC) | minutes | load before | load after | by |"
    yield "|---|---|---:|---:|---:|---|"
    for record in records:
        yield (
            f"| {record.package} | {record.started} | {record.wall / 60:.1f}"
            f" | {record.load_before:.1f} | {record.load_after:.1f} | `{record.command}` |"
        )
    yield ""


def _behind(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the rows that one would rather not show, the worst beside its peer first."""
    behind = [row for row in rows if row.ratio is not None and row.ratio < 1]
    short = [row for row in rows if row.met is False and row not in behind]
    if not behind + short:
        return
    yield ""
    yield "## Where we are not ahead"
    if behind:
        yield ""
        compared = sum(row.ratio is not None for row in rows)
        yield f"{len(behind)} of {compared} comparisons are lost:"
        yield ""
        yield from table(sorted(behind, key=lambda row: row.ratio or 0))
    if short:
        yield ""
        yield "No peer is ahead here, or there is none, but the goal is not met:"
        yield ""
        yield from table(short)
