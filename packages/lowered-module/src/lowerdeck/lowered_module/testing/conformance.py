"""Test a backend and its partitioner with sample programs."""

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
from lowerdeck.lowered_module.inspect.summary import counted
from lowerdeck.lowered_module.lowering import to_backend
from lowerdeck.lowered_module.program.debug_handles import HANDLE
from lowerdeck.lowered_module.program.graphs import nodes_of
from lowerdeck.lowered_module.testing.programs import Sample, TwoPartitions, generated


@dataclass(slots=True)
class ConformanceReport:
    """Result of ``check_backend``.

    Attributes:
        delegates: Number of delegates in all samples; without any, nothing was tested.
        failures: The failed samples of each check, with reasons.
        tried: The number of samples of each check.
        not_run: Reasons why checks could not be run.
    """

    delegates: int = 0
    failures: dict[str, list[str]] = field(default_factory=dict)
    tried: dict[str, int] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether nodes were delegated and no check failed; see also ``not_run``."""
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
        note = "" if self.delegates else ": nothing was delegated, so nothing was tested"
        if self.delegates and self.not_run:
            note = ", not run by a runtime: the results of the files are unchecked"
        lines.append(f"{counted(self.delegates, 'delegate')}{note}")
        return "\n".join(lines)

    def attempt(self, check: str, sample: Sample, action: Callable[[], Any]) -> Any:
        """Run ``action`` and record whether it raised; return its result, or None.

        Args:
            check: Name of the check.
            action: Raises if the check fails.
        """
        self.tried[check] = self.tried.get(check, 0) + 1
        try:
            return action()
        except Exception as error:  # a backend may raise anything
            reason = f"{sample.name}: {type(error).__name__}: {error}"
            self.failures.setdefault(check, []).append(reason.splitlines()[0][:300])
            return None


def default_samples(seeds: Iterable[int] = range(6)) -> list[Sample]:
    """Return samples: a model of two partitions with weights, then generated ones.

    Some generated samples have state, dynamic sizes or branches.

    Args:
        seeds: One seed for each generated sample.
    """
    weighted = Sample("two partitions", TwoPartitions(), (torch.linspace(-1, 1, 16).view(4, 4),))
    return [weighted] + [
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
    """Test a partitioner and its backends on sample programs.

    Args:
        samples: Sample programs, each a ``Sample`` or ``(module, inputs)``; ``default_samples()``
            if None.
        runtimes: Runtimes by backend id, which take precedence over installed ones. Without a
            runtime, files are written but not run.
        tolerance: Largest allowed difference from eager, absolute and relative; each sample is
            called three times with different inputs, and its state is compared.

    Returns:
        A report; ``print`` it for a list of checks.

    Raises:
        LoweringError: A sample is neither a ``Sample`` nor ``(module, inputs)``.

    Example:
        >>> from lowerdeck.lowered_module.testing import RunPartitioner, generated
        >>> report = check_backend(RunPartitioner(lambda node: True), samples=[generated(1, 4)])
        >>> report.passed
        True
    """
    report = ConformanceReport()
    samples = default_samples() if samples is None else samples
    for sample in [_as_sample(value, number) for number, value in enumerate(samples)]:
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
        "the caller's program and weights are unchanged",
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
    # Write the file first: running the program in eager changes its state.
    emitted = attempt("it can be written", lambda: emit(lowered).to_bytes())
    in_eager = lowered.module()
    attempt(
        "in eager it computes what the module does",
        lambda: _compare(sample, in_eager, lambda: dict(in_eager.named_buffers()), tolerance),
    )
    if emitted is None:
        return
    check = "the runtime computes what the module does"
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
    """Compare dtypes, and elements with an absolute and relative tolerance."""
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
    """Return why delegates of these backends cannot be run here, or None."""
    if importlib.util.find_spec("lowerdeck.runner") is None:
        return "lowerdeck.runner is not installed (pip install lowerdeck-runner)"
    installed = {entry.name for entry in installed_entries("lowerdeck.runtimes")}
    missing = backend_ids - {*runtimes, *installed}
    if not missing:
        return None
    names = ", ".join(sorted(missing))
    return (
        f"no runtime of {names} is installed: declare it as an entry point of the group "
        "'lowerdeck.runtimes', or pass it, as check_backend(..., runtimes={backend_id: runtime})"
    )


def _check_maps(delegates: list[Any]) -> None:
    for delegate in delegates:
        inner = nodes_of(delegate.original_module.graph_module)
        used = {node.meta.get(HANDLE) for node in inner}
        for key, handles in (delegate.meta["debug_handle_map"] or {}).items():
            unused = set(handles) - used
            _expect(not unused, f"{key!r} maps to unused handles {sorted(unused)}")


def _fingerprint(program: ExportedProgram) -> tuple[Any, ...]:
    return (
        str(program.graph),
        str(program.graph_signature),
        [(name, value.sum().item()) for name, value in program.state_dict.items()],
    )


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)
