"""Draw the results: a plot of each series' growth, and the ratios of all packages in one.

The files are the same whenever the figures are: no dates, no random names. Text stays text, and
the ground is a light grey, so that they can be read on a dark page too.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import ticker
from matplotlib.figure import Figure

from benchmarks.harness import Row
from benchmarks.page import OVERVIEW, plot_name, title
from benchmarks.records import Record

GROUND, TEXT, LINES = "#f6f6f3", "#1c1c1a", "#c9c9c4"
OURS, PEER, GUIDE = "#1f5fb4", "#b4480f", "#5f5f5a"
# Told apart by shape as well as by colour.
KINDS = {"time": ("o", "#1f5fb4"), "memory and size": ("s", "#157a5b"), "other": ("D", "#8a4fc0")}
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "lowerdeck",
    "font.family": "sans-serif",
    "font.size": 10.0,
    "axes.edgecolor": GUIDE,
    "axes.facecolor": GROUND,
    "axes.labelcolor": TEXT,
    "figure.facecolor": GROUND,
    "grid.color": LINES,
    "text.color": TEXT,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
}


def draw(records: Sequence[Record], folder: Path) -> None:
    """Write all plots as SVG, and remove those that no row has any more.

    Args:
        records: What was measured.
        folder: Where to write.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = [row for record in records for row in record.rows]
    with mpl.rc_context(_STYLE):
        figures = {plot_name(row): _growth(row) for row in rows if row.series}
        if any(row.ratio for row in rows):
            figures[OVERVIEW] = _overview(rows)
        for name, figure in figures.items():
            # No date and no version of matplotlib, so that a new file means new figures.
            figure.savefig(folder / name, format="svg", metadata={"Date": None, "Creator": None})
    for path in folder.glob("*.svg"):
        if path.name not in figures:
            path.unlink()


def _growth(row: Row) -> Figure:
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    sizes = [size for size, _, _ in row.series]
    ours = [cost for _, cost, _ in row.series]
    theirs = [(size, cost) for size, _, cost in row.series if cost is not None]
    if theirs:
        xs, ys = zip(*theirs, strict=True)
        axes.plot(xs, ys, color=PEER, marker="s", label="peer")
    axes.plot(sizes, ours, color=OURS, marker="o", label="ours")
    guide = [ours[-1] * size / sizes[-1] for size in sizes]
    axes.plot(sizes, guide, color=GUIDE, linestyle=":", label="linear (slope 1)")
    _logarithmic(axes, sizes)
    axes.set_title(title(row), fontsize=10, wrap=True)
    axes.set_xlabel(row.axes[0])
    axes.set_ylabel(row.axes[1])
    axes.legend(facecolor=GROUND, edgecolor=LINES)
    return figure


def _logarithmic(axes: Any, sizes: Sequence[float]) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.grid(visible=True)
    # The sizes that were measured say more than powers of ten.
    axes.set_xticks(sizes, [f"{size:,.0f}" for size in sizes])
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    low, high = axes.get_ylim()
    # Powers of ten alone would label one line or none of less than two decades.
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
    axes.yaxis.set_minor_locator(ticker.NullLocator())
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))


def _overview(rows: Sequence[Row]) -> Figure:
    # What counts right answers is not times better.
    compared = [row for row in rows if row.ratio and row.unit != "% right"]
    packages = sorted({row.package for row in compared}, reverse=True)
    figure = Figure(figsize=(7.6, 1.3 + 0.55 * len(packages)), layout="constrained")
    axes = figure.subplots()
    for height, package in enumerate(packages):
        ratios = [row.ratio or 1.0 for row in compared if row.package == package]
        middle = statistics.median(ratios)
        axes.barh(height, middle - 1, left=1, height=0.62, color="#b9cbe4", zorder=2)
        axes.text(middle, height + 0.36, f"{middle:.3g}x", fontsize=8, ha="center", va="bottom")
    for kind, (marker, colour) in KINDS.items():
        # Points nearer to each other than a mark is wide are one in the picture.
        points = list(
            {
                (round(25 * math.log10(row.ratio)), row.package): (
                    row.ratio,
                    packages.index(row.package),
                )
                for row in compared
                if _kind(row) == kind and row.ratio
            }.values()
        )
        if points:
            xs, ys = zip(*points, strict=True)
            axes.plot(xs, ys, marker, ms=4.5, color=colour, alpha=0.75, label=kind, zorder=3)
    axes.set_xscale("log")
    axes.set_xlim(0.8 * min(1, *(row.ratio or 1 for row in compared)))
    axes.axvline(1, color=TEXT, linewidth=1, zorder=4)
    axes.set_yticks(range(len(packages)), packages)
    axes.set_ylim(-0.6, len(packages) - 0.2)
    axes.grid(visible=True, axis="x", zorder=0)
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}x"))
    axes.set_xlabel("peer / ours (right of 1x: ours is better); bar: median, mark: a row")
    figure.legend(loc="outside upper center", ncols=3, facecolor=GROUND, edgecolor=LINES)
    return figure


def _kind(row: Row) -> str:
    if row.unit in ("s", "ms", "us", "us/node", "x eager"):
        return "time"
    sizes = ("MB", "B", "x its size", "% of the weights")
    return "memory and size" if row.unit in sizes else "other"
