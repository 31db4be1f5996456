"""Lower a program for each installed backend and keep the fastest correct result."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.export import ExportedProgram

from lowerdeck.inspect import installed_entries
from lowerdeck.lowered_module.authoring.registry import PARTITIONERS
from lowerdeck.lowered_module.errors import LoweringError, in_a_line
from lowerdeck.lowered_module.inspect.accuracy import accuracy_of
from lowerdeck.lowered_module.inspect.summary import counted
from lowerdeck.lowered_module.pipeline import LoweredProgram, lower
from lowerdeck.lowered_module.progress import Progress
from lowerdeck.torch_base import pytree

_AS_FAST = 1.01
"""A file without a backend is preferred if it is at most 1 % slower than the fastest."""
_SECONDS = 0.5
"""Measuring time of each file, which is called 3 to 1000 times."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Result of lowering a program for one backend.

    Attributes:
        name: The backend, or ``"no backend"`` for the runtime's own kernels alone.
        milliseconds: Shortest time of a call in the official runtime; infinite if the lowering
            cannot be chosen.
        outcome: Number of delegates and difference from eager, or why the lowering cannot be
            chosen.
        chosen: Whether ``lower_fastest`` returned this lowering.
    """

    name: str
    milliseconds: float
    outcome: str
    chosen: bool = False

    @property
    def is_right(self) -> bool:
        """Whether this lowering can be chosen."""
        return math.isfinite(self.milliseconds)

    def line(self, width: int = 20) -> str:
        """Return a line of the table of ``lowerdeck lower --auto``.

        Args:
            width: Width of the name column in characters.
        """
        spent = f"{self.milliseconds:>9.3f} ms" if self.is_right else " " * 12
        return f"{'*' if self.chosen else ' '} {self.name:<{width}} {spent}  {self.outcome}"

    def __str__(self) -> str:
        """Return the line of the table."""
        return self.line()


def lower_fastest(
    program: ExportedProgram,
    expected: Iterable[Any],
    *,
    backends: Sequence[str] | None = None,
    tolerance: float = 1e-4,
    progress: Progress | None = None,
) -> tuple[LoweredProgram, list[Trial]]:
    """Return the lowering that runs fastest in the official runtime, and all trials.

    The program is lowered for the portable kernels and for each backend, and called on its example
    inputs in a separate process, with the runtime's default number of threads. ``executorch`` must
    be installed.

    Args:
        program: The program; it is measured on its example inputs.
        expected: The flat results of eager on the example inputs.
        backends: Names of installed partitioners; None for all whose backend is linked into the
            runtime.
        tolerance: Largest allowed difference from eager.
        progress: Called before the first trial and after each one with the number of finished
            trials, the number of all, and a label.

    Raises:
        LoweringError: The runtime is not installed, the program has no example inputs, or no file
            has correct outputs.

    Example:
        >>> import torch
        >>> from lowerdeck.lowered_module import lower_fastest  # doctest: +SKIP
        >>> model, inputs = torch.nn.Linear(2, 3), (torch.ones(1, 2),)
        >>> exported = torch.export.export(model, inputs)
        >>> lowered, trials = lower_fastest(exported, [model(*inputs)])  # doctest: +SKIP
    """
    if program.example_inputs is None:
        raise LoweringError(
            "the program has no example inputs to measure it on: set its example_inputs"
        )
    inputs, expected = pytree.tree_leaves(program.example_inputs), list(expected)
    show = _silent if progress is None else progress
    trials: list[Trial] = []
    programs: list[LoweredProgram | None] = []
    try:
        from lowerdeck.runner import OfficialRuntime, OfficialRuntimeError
    except ModuleNotFoundError as error:
        raise LoweringError(
            "measuring needs lowerdeck.runner: pip install lowerdeck-lowered-module[run]"
        ) from error
    with OfficialRuntime() as runtime, tempfile.TemporaryDirectory() as folder:
        try:
            available = runtime.backends()
        except OfficialRuntimeError as error:
            raise LoweringError(str(error)) from error
        installed = {entry.name for entry in installed_entries(PARTITIONERS)}
        names = ["", *(sorted(installed & set(available)) if backends is None else backends)]
        show(0, len(names), f"the runtime's own kernels, then {', '.join(names[1:]) or 'nothing'}")
        for name in names:
            start = time.perf_counter()
            lowered, shortest, label = None, math.inf, "right"
            try:
                if name and name not in available:
                    raise LoweringError(f"the runtime has no backend {name}")
                file = Path(folder, "model.pte")
                lowered, outcome = _lowered(program, name, file)
                runtime.load(file)
                first = runtime.run(inputs)
                differences = [output.largest for output in accuracy_of(first.outputs, expected)]
                difference = max(differences, default=0.0)
                if not difference <= tolerance:
                    raise LoweringError(
                        f"differs from eager by {difference:.3g}, expected at most {tolerance:.3g}"
                    )
                # The minimum: other load on the machine only makes calls slower.
                repeat = int(min(max(_SECONDS / first.seconds[0], 3), 1000))
                shortest = min(runtime.run(inputs, repeat=repeat).seconds)
                outcome += f", differs by {difference:.3g}"
            except (LoweringError, OfficialRuntimeError) as error:
                outcome = label = str(error)
            programs.append(lowered)
            trials.append(Trial(name or "no backend", 1e3 * shortest, outcome))
            took = time.perf_counter() - start
            show(len(trials), len(names), f"{trials[-1].name}: {label}, took {took:.1f} s")
    best = min(range(len(trials)), key=lambda number: trials[number].milliseconds)
    # The first trial has no backend.
    if trials[0].milliseconds <= _AS_FAST * trials[best].milliseconds:
        best = 0
    trials[best] = replace(trials[best], chosen=True)
    chosen = programs[best]
    if chosen is None or not trials[best].is_right:
        reasons = "; ".join(f"{trial.name}: {trial.outcome}" for trial in trials)
        raise LoweringError(f"no lowering has correct outputs: {reasons}")
    return chosen, trials


def trial_lines(trials: Sequence[Trial]) -> Iterator[str]:
    """Yield the lines of a table of trials, fastest first."""
    yield "milliseconds a call, in the official ExecuTorch runtime on this machine"
    width = max((len(trial.name) for trial in trials), default=0)
    for trial in sorted(trials, key=lambda each_trial: each_trial.milliseconds):
        yield trial.line(width)


def _lowered(program: ExportedProgram, name: str, file: Path) -> tuple[LoweredProgram, str]:
    """Lower a program for one backend and save it; return it and a delegation summary."""
    try:
        lowered = lower(program, name or None, progress=_silent)
    except Exception as error:
        # A failing backend must not prevent the others.
        raise LoweringError(f"cannot be lowered: {in_a_line(error)}") from error
    summary = lowered.delegation()
    if name and not summary.delegates.get(name):
        raise LoweringError("delegates nothing")
    delegates, left = sum(summary.delegates.values()), sum(summary.left.values())
    megabytes = lowered.save(file) / 1e6
    counts = f"{counted(delegates, 'delegate')}, {counted(left, 'node')} left"
    return lowered, f"{counts}, {megabytes:.4g} MB"


def _silent(done: int, total: int, label: str) -> None:
    """Ignore the progress of a single lowering."""
