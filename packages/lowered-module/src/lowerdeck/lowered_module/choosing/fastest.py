"""A model lowered in several ways, of which the fastest that is right is kept."""

from __future__ import annotations

import importlib.metadata
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.export import ExportedProgram

from lowerdeck.lowered_module.authoring.registry import PARTITIONERS, find_partitioner
from lowerdeck.lowered_module.choosing.halves import Halves
from lowerdeck.lowered_module.choosing.official_runtime import OfficialRuntime
from lowerdeck.lowered_module.errors import LoweringError
from lowerdeck.lowered_module.inspect.accuracy import accuracy_of
from lowerdeck.lowered_module.pipeline import LoweredProgram, in_a_line, lower
from lowerdeck.lowered_module.preprocess import Progress
from lowerdeck.torch_base import pytree

_ROUNDS = 15
_SLOW = 4
_QUICK = 20.0
"""A plan has no turn that is so many times slower than the fastest, and takes more milliseconds:
one call tells enough, and many would take minutes on a large model."""
_NEAR = 2.0
"""Of two backends of which one takes more than so many times as long, the slower one is hardly
better at any part."""
_AS_FAST = 1.01
"""What is within a hundredth of the fastest is as fast: the plan with fewer backends is taken."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of lowering a model in one way.

    Attributes:
        backends: Who was asked, the first choosing first; nobody for the runtime's own kernels.
        delegates: How many partitions went to backends.
        left: How many computing nodes stayed with other kernels.
        file_bytes: Size of the file.
        milliseconds: Median time of a call in the official runtime, or the time of one call where
            that is far more than the fastest plan's; None where it was not taken.
        difference: Largest difference from eager; None where the file does not run.
        why_not: Why it cannot be chosen; empty where it can.
        chosen: Whether it was.
        after: Where the program was cut for two backends: the module, or else the node, behind
            which the second one begins. Empty where each may take nodes anywhere.
    """

    backends: tuple[str, ...]
    delegates: int = 0
    left: int = 0
    file_bytes: int = 0
    milliseconds: float | None = None
    difference: float | None = None
    why_not: str = ""
    chosen: bool = False
    after: str = ""

    @property
    def name(self) -> str:
        """Return who was asked, in words."""
        return _name(self.backends) + (f" after {self.after}" if self.after else "")

    @property
    def outcome(self) -> str:
        """Return who was asked, and what came of it, in words; times come when all are timed."""
        return f"{self.name}: {self.why_not or 'right'}"

    def line(self, width: int = 34) -> str:
        """Return a line of the table of ``lowerdeck lower --auto``.

        Args:
            width: Of the column of names, in characters.
        """
        name = self.name
        if self.milliseconds is None:
            return f"  {name:<{width}} {'':>12}  {self.why_not}"
        mark = "*" if self.chosen else " "
        told = (
            f"{self.delegates} delegates, {self.left} nodes left, {self.file_bytes / 1e6:.4g} MB, "
            f"differs by {self.difference:.3g}"
        )
        return f"{mark} {name:<{width}} {self.milliseconds:>9.3f} ms  {told}"

    def __str__(self) -> str:
        """Return the line of the table."""
        return self.line()


def lower_fastest(
    program: ExportedProgram,
    wanted: Iterable[Any],
    *,
    backends: Sequence[str] | None = None,
    tolerance: float = 1e-4,
    cuts: int = 5,
    progress: Progress | None = None,
) -> tuple[LoweredProgram, list[Trial]]:
    """Return the lowering of a program that is fastest in the official runtime, and all trials.

    The runtime's own kernels, each backend, and each pair of backends of which the first leaves
    something, are lowered and run on the program's example inputs, one after the other in
    processes of their own; what runs, is right and is not far slower than another is then timed
    in turn, with as many threads as the runtime takes. ``executorch`` must be installed.

    Where two backends are near each other, each may be better at other parts of the program: then
    it is cut in two at some places, in either order, and these plans are timed beside the others.

    Args:
        program: The program; its example inputs are what is measured.
        wanted: What eager gives for them, flat.
        backends: Names of installed partitioners; None for all that the runtime has a backend of.
        tolerance: How far outputs may be from eager's.
        cuts: At how many places to cut; 0 for none.
        progress: Called after each trial with how many are done, how many there are at most, and
            which one it was, what came of it and how long it took; before the first one, and
            before what is right is timed, with what comes next.

    Raises:
        LoweringError: The runtime is not installed, the program has no example inputs, or nothing
            that was tried is right.

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
    trials: list[Trial] = []
    show = _silent if progress is None else progress
    kept: dict[int, LoweredProgram] = {}
    with OfficialRuntime() as runtime, tempfile.TemporaryDirectory() as folder:
        known = runtime.backends()
        names = _installed(known) if backends is None else list(backends)
        more = 2 * cuts if len(names) > 1 else 0
        files: dict[int, Path] = {}

        def most() -> int:
            return max(_most_plans(names, trials) + more, len(trials))

        def add(made: Iterable[tuple[Trial, LoweredProgram | None]]) -> None:
            start = time.perf_counter()
            for trial, lowered in made:
                add_one(trial, lowered)
                took = time.perf_counter() - start
                show(len(trials), most(), f"{trials[-1].outcome}, took {took:.1f} s")
                start = time.perf_counter()

        def add_one(trial: Trial, lowered: LoweredProgram | None) -> None:
            if lowered is not None:
                place = len(trials)
                files[place] = Path(folder, f"{place}.pte")
                lowered.save(files[place])
                trial = _tried(runtime, trial, files[place], inputs, expected, tolerance)
                kept[place] = lowered
            trials.append(trial)

        def time_in_turn(places: Sequence[int], told: str) -> None:
            show(len(trials), most(), told)
            _time(runtime, trials, places, files, inputs)

        asked = ", ".join(names) or "no backend"
        show(0, most(), f"the runtime's own kernels, then {asked}")
        add(_lowered(program, plan, known) for plan in _plans(names, trials))
        if not (right := _worth_timing(trials)):
            raise LoweringError(f"nothing that was tried is right: {_reasons(trials)}")
        time_in_turn(right, f"{len(right)} of them are right and timed in turn")
        if near := _near_each_other(trials) if cuts else ():
            pairs = list(itertools.permutations(near))
            places = (_cut(program, one, other, known, cuts) for one, other in pairs)
            add(itertools.chain.from_iterable(places))
            more = 0
            right = _worth_timing(trials)
            time_in_turn(right, f"{len(right)} of them are right and timed in turn")
        if last := _last_two(trials, right):
            told = " beside ".join(trials[place].name for place in last)
            time_in_turn(last, f"{told}, once more")
        chosen = _best(trials, last or right)
    trials[chosen] = replace(trials[chosen], chosen=True)
    return kept[chosen], trials


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


def _plans(names: Sequence[str], trials: Sequence[Trial]) -> Iterator[tuple[str, ...]]:
    """Yield who is asked, simple plans first; pairs where the first one left something."""
    yield ()
    for name in names:
        yield (name,)
    some = {trial.backends for trial in trials if trial.delegates and trial.left}
    for one, other in itertools.permutations(names, 2):
        if (one,) in some:
            yield one, other


def _most_plans(names: Sequence[str], trials: Sequence[Trial]) -> int:
    """Return how many plans there are at most, as far as the trials tell by now."""
    if len(trials) <= len(names):
        return 1 + len(names) ** 2
    return sum(1 for _ in _plans(names, trials))


def _worth_timing(trials: Sequence[Trial]) -> list[int]:
    """Return the places of trials that are right and not far slower than another."""
    once = {
        place: trial.milliseconds
        for place, trial in enumerate(trials)
        if trial.milliseconds is not None and not trial.why_not
    }
    slow = max(_SLOW * min(once.values(), default=0.0), _QUICK)
    return [place for place, milliseconds in once.items() if milliseconds <= slow]


def _time(
    runtime: OfficialRuntime,
    trials: list[Trial],
    right: Sequence[int],
    files: Mapping[int, Path],
    inputs: Sequence[Any],
) -> None:
    """Give some trials the median of what their calls take, in turn."""
    times = runtime.seconds_in_turn([files[place] for place in right], inputs, _ROUNDS)
    for place, samples in zip(right, times, strict=True):
        trials[place] = replace(trials[place], milliseconds=1e3 * statistics.median(samples))


def _near_each_other(trials: Sequence[Trial]) -> tuple[str, ...]:
    """Return the two fastest backends if cutting the program between them may be faster."""
    times = sorted(
        (trial.milliseconds, trial.backends[0])
        for trial in trials
        if len(trial.backends) == 1 and trial.milliseconds is not None and not trial.why_not
    )[:2]
    if len(times) < 2 or times[1][0] > _NEAR * times[0][0]:
        return ()
    return tuple(name for _, name in times)


def _cut(
    program: ExportedProgram, one: str, other: str, known: Sequence[str], cuts: int
) -> Iterator[tuple[Trial, LoweredProgram | None]]:
    """Yield what comes of cutting the program for two backends at some places."""
    before = ""
    for number in range(1, cuts + 1):
        halves = Halves(find_partitioner(one), find_partitioner(other), number, cuts)
        trial, lowered = _lowered(program, (one, other), known, halves)
        # A short program has fewer places than were asked for, or none.
        if halves.after != before:
            yield trial, lowered
        before = halves.after


def _lowered(
    program: ExportedProgram,
    plan: tuple[str, ...],
    known: Sequence[str],
    halves: Halves | None = None,
) -> tuple[Trial, LoweredProgram | None]:
    trial = Trial(plan)
    if missing := [name for name in plan if name not in known]:
        return replace(trial, why_not=f"the runtime has no {' and no '.join(missing)}"), None
    try:
        chosen = list(plan) if halves is None else [halves]
        lowered = lower(program, chosen, progress=_silent)
    except Exception as error:
        # Whatever an installed backend raises is a reason against it, none against the others.
        return replace(trial, why_not=f"cannot be lowered: {in_a_line(error)}"), None
    if halves is not None:
        trial = replace(trial, after=halves.after)
    summary = lowered.delegation()
    if plan and any(not summary.delegates.get(name) for name in plan):
        return replace(trial, why_not="takes nothing that is not in a simpler plan"), None
    made = replace(
        trial, delegates=sum(summary.delegates.values()), left=sum(summary.left.values())
    )
    return made, lowered


def _tried(
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


def _last_two(trials: Sequence[Trial], places: Sequence[int]) -> list[int]:
    """Return the best plan and the best simple one, if they must be timed once more.

    The first of a dozen plans that are near each other owes some of it to luck.
    """
    best = _best(trials, places)
    simple = [place for place in places if len(trials[place].backends) < 2]
    return [best, _best(trials, simple)] if simple and best not in simple else []


def _best(trials: Sequence[Trial], places: Sequence[int]) -> int:
    """Return where the plan with the fewest backends is of those as fast as the fastest."""
    least = min(trials[place].milliseconds or 0.0 for place in places)
    near = [one for one in places if (trials[one].milliseconds or 0.0) <= _AS_FAST * least]
    return min(near, key=lambda place: len(trials[place].backends))


def _reasons(trials: Sequence[Trial]) -> str:
    return "; ".join(f"{_name(one.backends)}: {one.why_not}" for one in trials)


def _name(backends: Sequence[str]) -> str:
    return " then ".join(backends) or "no backend"


def _silent(done: int, total: int, label: str) -> None:
    """Show nothing: many lowerings follow each other."""
