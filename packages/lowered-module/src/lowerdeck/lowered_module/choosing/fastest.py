"""A program lowered for each installed backend, of which the fastest lowering is kept."""

from __future__ import annotations

import importlib.metadata
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.export import ExportedProgram

from lowerdeck.lowered_module.authoring.registry import PARTITIONERS
from lowerdeck.lowered_module.choosing.official_runtime import OfficialRuntime
from lowerdeck.lowered_module.errors import LoweringError
from lowerdeck.lowered_module.inspect.accuracy import accuracy_of
from lowerdeck.lowered_module.pipeline import LoweredProgram, in_a_line, lower
from lowerdeck.lowered_module.preprocess import Progress
from lowerdeck.torch_base import pytree

_ROUNDS = 15
_FAR_SLOWER = 4
_QUICK_MS = 20.0
"""A file that is so many times slower than the fastest, and takes more milliseconds than this,
is called once: on a large model its rounds would take minutes."""
_AS_FAST = 1.01
"""Within a hundredth of the fastest, a file without a backend is preferred to one with."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of lowering a program for one backend.

    Attributes:
        backend: Its name; empty for the runtime's own kernels alone.
        delegates: How many partitions went to it.
        left: How many computing nodes stayed with the runtime's kernels.
        file_bytes: Size of the file.
        milliseconds: Median time of a call in the official runtime, or the time of one call where
            that is far more than the fastest file's; None where it was not taken.
        difference: Largest difference from eager; None where the file does not run.
        why_not: Why it cannot be chosen; empty where it can.
        chosen: Whether it was.
    """

    backend: str = ""
    delegates: int = 0
    left: int = 0
    file_bytes: int = 0
    milliseconds: float | None = None
    difference: float | None = None
    why_not: str = ""
    chosen: bool = False

    @property
    def name(self) -> str:
        """The backend in words."""
        return self.backend or "no backend"

    def line(self, width: int = 20) -> str:
        """Return a line of the table of ``lowerdeck lower --auto``.

        Args:
            width: Of the column of names, in characters.
        """
        if self.milliseconds is None:
            return f"  {self.name:<{width}} {'':>12}  {self.why_not}"
        mark = "*" if self.chosen else " "
        told = (
            f"{self.delegates} delegates, {self.left} nodes left, {self.file_bytes / 1e6:.4g} MB, "
            f"differs by {self.difference:.3g}"
        )
        return f"{mark} {self.name:<{width}} {self.milliseconds:>9.3f} ms  {told}"

    def __str__(self) -> str:
        """Return the line of the table."""
        return self.line()


def lower_fastest(
    program: ExportedProgram,
    wanted: Iterable[Any],
    *,
    backends: Sequence[str] | None = None,
    tolerance: float = 1e-4,
    progress: Progress | None = None,
) -> tuple[LoweredProgram, list[Trial]]:
    """Return the lowering of a program that is fastest in the official runtime, and all trials.

    The program is lowered for the runtime's own kernels and for each backend, and called on its
    example inputs in a process of its own; the files that are right and not far slower than
    another are then timed in turn, with as many threads as the runtime takes. ``executorch`` must
    be installed.

    Args:
        program: The program; its example inputs are what is measured.
        wanted: What eager gives for them, flat.
        backends: Names of installed partitioners; None for all whose backend the runtime has.
        tolerance: How far outputs may be from eager's.
        progress: Called before the first trial, after each, and before the timing, with how many
            trials are done, how many there are, and what was done or comes next.

    Raises:
        LoweringError: The runtime is not installed, the program has no example inputs, or no
            file is right.

    Example:
        >>> import torch
        >>> from lowerdeck.lowered_module import lower_fastest  # doctest: +SKIP
        >>> model, inputs = torch.nn.Linear(2, 3), (torch.ones(1, 2),)
        >>> exported = torch.export.export(model, inputs)
        >>> lowered, trials = lower_fastest(exported, [model(*inputs)])  # doctest: +SKIP
    """
    if program.example_inputs is None:
        raise LoweringError(
            "the program has no example inputs to be measured with: export it, or set its "
            "example_inputs"
        )
    inputs, expected = pytree.tree_leaves(program.example_inputs), list(wanted)
    show = _silent if progress is None else progress
    trials: list[Trial] = []
    made: list[LoweredProgram | None] = []
    with OfficialRuntime() as runtime, tempfile.TemporaryDirectory() as folder:
        known = runtime.backends()
        names = ["", *(_installed(known) if backends is None else backends)]
        files = [Path(folder, f"{number}.pte") for number in range(len(names))]
        show(0, len(names), f"the runtime's own kernels, then {', '.join(names[1:]) or 'nothing'}")
        for name, file in zip(names, files, strict=True):
            start = time.perf_counter()
            trial, lowered = _lowered(program, name, known)
            if lowered is not None:
                lowered.save(file)
                trial = _called(runtime, trial, file, inputs, expected, tolerance)
            trials.append(trial)
            made.append(lowered)
            took = time.perf_counter() - start
            outcome = f"{trial.name}: {trial.why_not or 'right'}, took {took:.1f} s"
            show(len(trials), len(names), outcome)
        timed = _worth_timing(trials)
        if not timed:
            reasons = "; ".join(f"{trial.name}: {trial.why_not}" for trial in trials)
            raise LoweringError(f"nothing that was tried is right: {reasons}")
        show(len(trials), len(names), f"{len(timed)} of them are right and timed in turn")
        times = runtime.seconds_in_turn([files[number] for number in timed], inputs, _ROUNDS)
    medians = [1e3 * statistics.median(samples) for samples in times]
    for number, milliseconds in zip(timed, medians, strict=True):
        trials[number] = replace(trials[number], milliseconds=milliseconds)
    as_fast = zip(timed, medians, strict=True)
    near = [number for number, one in as_fast if one <= _AS_FAST * min(medians)]
    best = 0 if 0 in near else timed[medians.index(min(medians))]
    trials[best] = replace(trials[best], chosen=True)
    chosen = made[best]
    assert chosen is not None
    return chosen, trials


def trial_lines(trials: Sequence[Trial]) -> Iterator[str]:
    """Yield the table of some trials, the fastest first.

    Args:
        trials: What was tried.
    """
    yield "milliseconds a call, in the official ExecuTorch runtime on this machine"
    last, width = float("inf"), max((len(trial.name) for trial in trials), default=0)
    for trial in sorted(
        trials, key=lambda one: last if one.milliseconds is None else one.milliseconds
    ):
        yield trial.line(width)


def _installed(known: Sequence[str]) -> list[str]:
    """Return the installed partitioners whose backend the runtime has, each name once."""
    entries = importlib.metadata.entry_points(group=PARTITIONERS)
    return sorted({entry.name for entry in entries} & set(known))


def _lowered(
    program: ExportedProgram, name: str, known: Sequence[str]
) -> tuple[Trial, LoweredProgram | None]:
    trial = Trial(name)
    if name and name not in known:
        return replace(trial, why_not=f"the runtime has no {name}"), None
    try:
        lowered = lower(program, name or None, progress=_silent)
    except Exception as error:
        # Whatever an installed backend raises is a reason against it, none against the others.
        return replace(trial, why_not=f"cannot be lowered: {in_a_line(error)}"), None
    summary = lowered.delegation()
    if name and not summary.delegates.get(name):
        return replace(trial, why_not="takes nothing of the program"), None
    counts = sum(summary.delegates.values()), sum(summary.left.values())
    return replace(trial, delegates=counts[0], left=counts[1]), lowered


def _called(
    runtime: OfficialRuntime,
    trial: Trial,
    file: Path,
    inputs: Sequence[Any],
    wanted: Sequence[Any],
    tolerance: float,
) -> Trial:
    """Return the trial with what the first call of its file gave."""
    trial = replace(trial, file_bytes=file.stat().st_size)
    try:
        found, seconds = runtime.first_outputs(file, inputs)
        difference = max((each.largest for each in accuracy_of(found, wanted)), default=0.0)
    except (LoweringError, ValueError) as error:
        return replace(trial, why_not=in_a_line(error))
    if not difference <= tolerance:
        told = f"differs from eager by {difference:.3g}, more than {tolerance:.3g}"
        return replace(trial, difference=difference, why_not=told)
    return replace(trial, difference=difference, milliseconds=1e3 * seconds)


def _worth_timing(trials: Sequence[Trial]) -> list[int]:
    """Return the numbers of the trials that are right and not far slower than another."""
    once = {
        number: trial.milliseconds
        for number, trial in enumerate(trials)
        if trial.milliseconds is not None
    }
    slow = max(_FAR_SLOWER * min(once.values(), default=0.0), _QUICK_MS)
    return [number for number, milliseconds in once.items() if milliseconds <= slow]


def _silent(done: int, total: int, label: str) -> None:
    """Show nothing: many lowerings follow each other."""
