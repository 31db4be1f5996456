"""Run a backend and its partitioner against programs, and list what passes."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.export import ExportedProgram

from lowerdeck.emitter import emit
from lowerdeck.inspect import installed_entries
from lowerdeck.lowered_module.errors import LoweringError
from lowerdeck.lowered_module.inspect.accuracy import call_in_eager, pair_values
from lowerdeck.lowered_module.inspect.inspection import delegates_in
from lowerdeck.lowered_module.lowering import to_backend
from lowerdeck.lowered_module.program.debug_handles import HANDLE
from lowerdeck.lowered_module.program.graphs import nodes_of
from lowerdeck.lowered_module.testing.programs import Sample, generated


@dataclass(slots=True)
class ConformanceReport:
    """What passed and what did not.

    Attributes:
        delegates: Number of delegates over all samples. Without any, nothing was tried.
        failures: For each check the samples that failed it, with the reason.
        tried: For each check the number of samples it was tried on.
        not_run: For each check that could not be tried, why.
    """

    delegates: int = 0
    failures: dict[str, list[str]] = field(default_factory=dict)
    tried: dict[str, int] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether something was delegated and nothing failed; see also ``not_run``."""
        return self.delegates > 0 and not any(self.failures.values())

    def __str__(self) -> str:
        lines = []
        for check, count in self.tried.items():
            failed = self.failures.get(check, [])
            lines.append(
                f"{'FAIL' if failed else 'pass'}  {check} ({count - len(failed)}/{count})"
            )
            lines += [f"        {reason}" for reason in failed[:3]]
        lines += [f"not run  {check}: {reason}" for check, reason in self.not_run.items()]
        note = "" if self.delegates else ": nothing was delegated, so nothing was tried"
        if self.delegates and self.not_run:
            note = ", not run by a runtime half: the numbers of the files are unchecked"
        lines.append(f"{self.delegates} delegates{note}")
        return "\n".join(lines)

    def attempt(self, check: str, sample: Sample, action: Callable[[], Any]) -> Any:
        """Run ``action`` and note whether it raised; return its result, or None.

        Args:
            check: Name of the check.
            sample: What it is tried on.
            action: What to do; it raises if the check fails.
        """
        self.tried[check] = self.tried.get(check, 0) + 1
        try:
            return action()
        except Exception as error:  # the author's code may raise anything
            reason = f"{sample.name}: {type(error).__name__}: {error}"
            self.failures.setdefault(check, []).append(reason.splitlines()[0][:300])
            return None


def default_samples(seeds: Iterable[int] = range(6)) -> list[Sample]:
    """Return generated samples: with state, dynamic sizes and branches among them.

    Args:
        seeds: One sample is made of each.
    """
    return [
        generated(seed, 10, dynamic=seed % 3 == 1, state=seed % 2 == 0, control_flow=seed % 3 == 2)
        for seed in seeds
    ]


def check_backend(
    partitioner: Callable[[ExportedProgram], Any],
    *,
    samples: Iterable[Sample | tuple[torch.nn.Module, tuple[Any, ...]]] | None = None,
    runtimes: Mapping[str, Any] | None = None,
    tolerance: float = 1e-4,
) -> ConformanceReport:
    """Return what a partitioner and the backends that it names do well, and what not.

    Args:
        samples: Programs to try, each a ``Sample`` or ``(module, inputs)``; ``default_samples()``
            if None.
        runtimes: Runtime halves by backend id, for ``lowerdeck.runner``, before those that are
            installed. Without any, files are written and the report says "not run".
        tolerance: Largest difference from eager that is allowed, absolute and relative; each
            sample is called three times with different inputs, and its state compared.

    Returns:
        A report; print it for a list.

    Raises:
        LoweringError: A sample is another object.

    Example:
        >>> report = check_backend(RunPartitioner(lambda node: True), samples=[generated(1, 4)])
        >>> report.passed
        True
    """
    report = ConformanceReport()
    given = default_samples() if samples is None else samples
    for sample in [_as_sample(value, number) for number, value in enumerate(given)]:
        _try_sample(report, sample, partitioner, runtimes, tolerance)
    return report


def _as_sample(value: Any, number: int) -> Sample:
    if isinstance(value, Sample):
        return value
    match value:
        case torch.nn.Module() as module, tuple() as inputs:
            return Sample(f"sample {number}", module, inputs)
    raise LoweringError(
        f"sample {number} is a {type(value).__name__}, expected Sample(name, module, inputs, "
        "dynamic_shapes) or (module, inputs)"
    )


def _try_sample(
    report: ConformanceReport,
    sample: Sample,
    partitioner: Callable[[ExportedProgram], Any],
    runtimes: Mapping[str, Any] | None,
    tolerance: float,
) -> None:
    def attempt(check: str, action: Callable[[], Any]) -> Any:
        return report.attempt(check, sample, action)

    program = sample.export()
    before = _fingerprint(program)
    lowered = attempt("the program is lowered and valid", lambda: to_backend(program, partitioner))
    is_alike = _fingerprint(program) == before
    attempt(
        "the caller's program and weights are left alone",
        lambda: _expect(is_alike, "the program or its weights changed"),
    )
    if lowered is None:
        return
    delegates = delegates_in(lowered.graph_module)
    report.delegates += len(delegates)

    def lower_again() -> None:
        again = delegates_in(to_backend(program, partitioner).graph_module)
        blobs = [
            [delegate.processed_bytes for delegate in delegates_of_run]
            for delegates_of_run in (delegates, again)
        ]
        _expect(blobs[0] == blobs[1], "blobs differ from one lowering to the next")

    attempt("lowering again gives the same blobs", lower_again)
    attempt("debug maps name nodes of their partition", lambda: _check_maps(delegates))
    # Written before it is run: a program keeps the state that running it in eager leaves.
    emitted = attempt("it can be written", lambda: emit(lowered).to_bytes())
    in_eager = lowered.module()
    attempt(
        "in eager it computes what the module does",
        lambda: _compare(sample, in_eager, lambda: dict(in_eager.named_buffers()), tolerance),
    )
    if emitted is None:
        return
    check = "the runtime half computes what the module does"
    obstacle = _obstacle({delegate.backend_id for delegate in delegates}, runtimes or {})
    if obstacle is not None:
        report.not_run[check] = obstacle
        return

    def run_file() -> None:
        from lowerdeck.runner import load

        method = load(emitted, backends=dict(runtimes or {})).method("forward")
        _compare(sample, method, method.state, tolerance)

    attempt(check, run_file)


def _compare(
    sample: Sample,
    run: Callable[..., Any],
    state_of: Callable[[], Mapping[str, torch.Tensor]],
    tolerance: float,
) -> None:
    """Compare each element by its own size, and the dtype."""
    calls, state = call_in_eager(sample.module, sample.inputs, {})
    for name, number, value, expected in pair_values(calls, run, state, state_of):
        where = f"{name} differs from eager's in call {number} of {len(calls)}"
        if not isinstance(expected, torch.Tensor):
            _expect(type(value) is type(expected) and value == expected, where)
            continue
        torch.testing.assert_close(
            value,
            expected,
            atol=tolerance,
            rtol=tolerance,
            equal_nan=True,
            msg=partial(_in_a_line, where),
        )


def _in_a_line(where: str, reason: str) -> str:
    return f"{where}: {' '.join(reason.split())}"


def _obstacle(backend_ids: set[str], runtimes: Mapping[str, Any]) -> str | None:
    """Return why a file with delegates of these backends cannot be run here, or None."""
    if importlib.util.find_spec("lowerdeck.runner") is None:
        return "lowerdeck.runner is not installed (pip install lowerdeck-runner)"
    installed = {entry.name for entry in installed_entries("lowerdeck.runtimes")}
    missing = backend_ids - {*runtimes, *installed}
    if not missing:
        return None
    names = ", ".join(sorted(missing))
    return (
        f"no runtime half of {names} is installed: declare it as an entry point of the group "
        "'lowerdeck.runtimes', or pass it, as check_backend(..., runtimes={backend_id: half})"
    )


def _check_maps(delegates: list[Any]) -> None:
    for delegate in delegates:
        inner = nodes_of(delegate.original_module.graph_module)
        known = {node.meta.get(HANDLE) for node in inner}
        for key, handles in (delegate.meta["debug_handle_map"] or {}).items():
            strange = set(handles) - known
            _expect(not strange, f"{key!r} maps to handles {sorted(strange)} of no node")


def _fingerprint(program: ExportedProgram) -> tuple[Any, ...]:
    return (
        str(program.graph),
        str(program.graph_signature),
        [(name, value.sum().item()) for name, value in program.state_dict.items()],
    )


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)
