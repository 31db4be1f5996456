"""Times of instructions, from a trace that ``lowerdeck run --trace`` writes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from lowerdeck.inspect.report.embed import clip
from lowerdeck.serializer import ExecutionPlan, Program, TraceError, method_digest

Watched = Mapping[str, Mapping[tuple[int, int], dict[str, Any]]]
"""By method, then by chain and instruction: ``time`` in microseconds, ``module``, ``samples`` of
results, and ``parts`` and ``inside``, times and samples of operators in a delegate.
"""

_MOST_PARTS = 4096
_MOST_SAMPLES = 64


def watched_by(trace: str, program: Program) -> Watched:
    """Return the times of a program's instructions from a trace.

    Args:
        trace: JSON from lowerdeck-runner's ``Profile.chrome_trace``.
        program: The traced program, identified by the method digests in the trace.

    Raises:
        TraceError: The trace is invalid, or belongs to another program.
    """
    try:
        document = json.loads(trace)
        measured, digests = _watched(document["traceEvents"]), {**document["otherData"]["digests"]}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise TraceError(
            f"found {clip(trace, 40)!r}, expected a trace from `lowerdeck run FILE --trace OUT` "
            f"({type(error).__name__}: {error})"
        ) from error
    plans = {plan.name: plan for plan in program.execution_plan}
    if measured and not plans.keys() & measured.keys():
        raise TraceError(
            f"the trace has the methods {', '.join(map(clip, measured))}, the file has "
            f"{', '.join(map(clip, sorted(plans))) or 'no method'}: use a trace of this file"
        )
    for name in plans.keys() & measured.keys():
        trace_digest = clip(str(digests.get(name)), 40)
        digest = method_digest(program, plans[name])
        if trace_digest != digest:
            raise TraceError(
                f"the trace of {clip(name)!r} is of another program: its digest is "
                f"{trace_digest}, that of the file {digest}; use a trace of this file"
            )
    return measured


def _watched(events: list[dict[str, Any]]) -> Watched:
    methods: dict[str, dict[tuple[int, int], dict[str, Any]]] = {}
    for event in events:
        about = event["args"]
        where = int(about["chain"]), int(about["instruction"])
        method = methods.setdefault(str(event["pid"]), {})
        nothing = {"time": 0.0, "module": "", "samples": [], "parts": [], "inside": []}
        record = method.setdefault(where, nothing)
        spent = float(event["dur"])
        if not math.isfinite(spent):
            raise ValueError(f"a duration of {spent}")
        if event["cat"] == "instruction":
            # A loop runs an instruction several times.
            record["time"] += spent
            record["module"] = clip(str(about["module"]))
            record["samples"] = _samples(about)
            continue
        part = str(event["name"]).rpartition("/")[2]
        if part.isdecimal() and int(part) < _MOST_PARTS:
            parts = record["parts"]
            parts += [None] * (int(part) + 1 - len(parts))
            parts[int(part)] = (parts[int(part)] or 0.0) + spent
            record["inside"] += [[] for _ in range(len(parts) - len(record["inside"]))]
            record["inside"][int(part)] = _samples(about)
    return methods


def _samples(about: Mapping[str, Any]) -> list[float | None]:
    """Return the sampled numbers of a result, with None for infinities and NaN."""
    samples = [None if sample is None else float(sample) for sample in about.get("samples", [])]
    return [sample if sample is None or math.isfinite(sample) else None for sample in samples][
        :_MOST_SAMPLES
    ]


def watched_entry(plan: ExecutionPlan, watched: Watched) -> list[dict[str, Any] | None] | None:
    """Return the measurements of each instruction of a method, or None without a trace."""
    measured = watched.get(plan.name)
    if measured is None:
        return None
    return [
        measured.get((chain, index))
        for chain, steps in enumerate(plan.chains)
        for index in range(len(steps.instructions))
    ]
