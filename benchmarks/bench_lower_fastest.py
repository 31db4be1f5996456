"""The file that ``lower_fastest`` keeps for real models, beside each backend's.

One core, the official runtime. What it kept is timed anew, in turn with the others. All models
take half an hour: ``run.py lower_fastest --models "torchvision/*"`` takes some.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.harness import Row, before_others, chosen
from benchmarks.xnnpack_models import NAMES, build
from lowerdeck.lowered_module import LoweringError, Trial, lower, lower_fastest
from lowerdeck.lowered_module.choosing.official_runtime import OfficialRuntime
from lowerdeck.torch_base import pytree

PACKAGE = "lowered_module"
ROUNDS = 15
_GOAL = "at most 1.03 of the best backend's time"
_NO_SLOWER = 1.03


def rows(quick: bool, models: Sequence[str] = ()) -> Iterator[Row]:
    """Yield the time of each model's chosen file beside the best backend's.

    Args:
        quick: A few models only.
        models: Patterns of the names of those to measure, all if empty.
    """
    for name in NAMES[:2] if quick and not models else chosen(NAMES, models):
        try:
            yield _row(name)
        except (ImportError, RuntimeError, LoweringError) as error:
            reason = str(error).strip().splitlines()[-1][:160]
            yield Row(PACKAGE, f"fastest backend, {name}", 0.0, goal=_GOAL, met=False, note=reason)


def _row(name: str) -> Row:
    torch.manual_seed(0)
    model, inputs = build(name)
    model = model.eval().requires_grad_(False)
    with torch.no_grad():
        wanted = pytree.tree_leaves(model(*inputs))
    program = torch.export.export(model, inputs)
    largest = max(float(one.abs().max()) for one in wanted)
    with before_others():
        lowered, trials = lower_fastest(program, wanted, tolerance=1e-3 * max(1.0, largest))
    chosen = next(trial for trial in trials if trial.chosen)
    singles = [trial for trial in trials if trial.backend and not trial.why_not]
    with tempfile.TemporaryDirectory() as folder:
        files = {chosen.backend: Path(folder, "chosen.pte")}
        lowered.save(files[chosen.backend])
        for number, trial in enumerate(singles):
            if trial.backend not in files:
                files[trial.backend] = Path(folder, f"{number}.pte")
                lower(program, trial.backend).save(files[trial.backend])
        flat = pytree.tree_leaves(inputs)
        with before_others(), OfficialRuntime() as runtime:
            samples = runtime.seconds_in_turn(list(files.values()), flat, ROUNDS)
    times = {
        name: 1e3 * statistics.median(found) for name, found in zip(files, samples, strict=True)
    }
    best = min((times[trial.backend] for trial in singles), default=None)
    ours = times[chosen.backend]
    met = best is None or ours <= _NO_SLOWER * best
    return Row(
        *(PACKAGE, f"fastest backend, {name}", ours, best, "ms", _GOAL, met),
        f"{_told(chosen)}; " + "; ".join(_told(one) for one in trials if one is not chosen),
    )


def _told(trial: Trial) -> str:
    name = trial.backend.removesuffix("Backend") or "none"
    if trial.milliseconds is None:
        return f"{name}: {trial.why_not[:80]}"
    return f"{name} {trial.milliseconds:.4g} ms"
