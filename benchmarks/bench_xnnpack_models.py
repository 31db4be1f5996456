"""Real models through XNNPACK against ExecuTorch's own lowering: speed, delegates, calls, bytes.

By the rules of the comparison, a row is level when the lower bound of the median of pairs is at
least 0.97, or when both payloads do the same. Where the peer fails or computes something else,
the other file is our own of the float32 model.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.harness import Row, chosen
from benchmarks.xnnpack_files import FLOAT
from benchmarks.xnnpack_pairs import CASES, beside_float, compared, is_level

PACKAGE = "xnnpack"
_GOAL = "level or faster; no more delegates, calls left and bytes"


def rows(quick: bool, models: Sequence[str] = ()) -> Iterator[Row]:
    """Yield a row for each model and form, and then what they come to."""
    ratios: dict[bool, list[float]] = {True: [], False: []}
    sooner: list[float] = []
    names = chosen(dict.fromkeys(model for model, _ in CASES), models)
    cases = [(model, form) for model, form in CASES if model in names]
    for model, form in cases[:2] + cases[-2:] if quick and not models else cases:
        try:
            found = compared(model, form)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1][:120]
            yield Row(PACKAGE, f"run {model}, {form}", 0.0, goal=_GOAL, met=False, note=reason)
            continue
        if found["peer"]:
            sooner.append(found["peer"]["seconds"] / found["ours"]["seconds"])
        row = _row(model, form, found)
        ratios[form in FLOAT].append(row.ratio or 0.0)
        yield row
    for is_float, found_ratios in ratios.items():
        name = "float32" if is_float else "quantised and half precision"
        yield _total(f"median of {len(found_ratios)} cases, {name}", found_ratios, 1.2)
    yield _total(f"lowering, median of {len(sooner)} cases", sooner, 40)
    yield _total("lowering, least of them", [min(sooner, default=0.0)], 40)


def _row(model: str, form: str, found: dict[str, Any]) -> Row:
    ours, peer, run = found["ours"], found["peer"], found["run"]
    error = run["errors"][0]
    wrong = peer is not None and run["errors"][1] > max(0.05, 4 * error)
    if peer is None or wrong:
        run = beside_float(model, form, ours)
        why = (
            f"ExecuTorch's is wrong by {found['run']['errors'][1]:.2g}"
            if wrong
            else found["fails"]
        )
        note = f"beside our own float32 file: {why}; {_left(ours)}; error {error:.1g}"
        return _timed(model, form, run, met=run["low"] >= 0.97, note=note)
    pairs = [(one["delegates"], sum(one["left"].values()), one["size"]) for one in (ours, peer)]
    met = is_level(found) and all(mine <= theirs for mine, theirs in zip(*pairs, strict=True))
    note = (
        f"median between {run['low']:.2f} and {run['high']:.2f}; {_left(ours)} against"
        f" {_left(peer)}; lowered {peer['seconds'] / ours['seconds']:.0f}x sooner; error"
        f" {error:.1g} against {run['errors'][1]:.1g}"
    )
    return _timed(model, form, run, met=met, note=note)


def _timed(model: str, form: str, run: dict[str, Any], *, met: bool, note: str) -> Row:
    figures = (run["ours"], run["ours"] * run["ratio"])
    return Row(PACKAGE, f"run {model}, {form}", *figures, goal=_GOAL, met=met, note=note)


def _left(told: dict[str, Any]) -> str:
    calls = sum(told["left"].values())
    return f"{told['delegates']} delegates, {calls} calls left, {told['size'] / 1e6:.4g} MB"


def _total(case: str, ratios: list[float], goal: float) -> Row:
    found = statistics.median(ratios)
    return Row(PACKAGE, case, found, unit="x", goal=f">= {goal}x", met=found >= goal)
