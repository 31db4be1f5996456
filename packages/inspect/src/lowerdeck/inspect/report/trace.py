"""Times of instructions, from a trace that ``lowerdeck run --trace`` writes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from lowerdeck.inspect.report.embed import clip
from lowerdeck.serializer import (
    DelegateCall,
    ExecutionPlan,
    InstructionArguments,
    JumpFalseCall,
    KernelCall,
    Program,
    TraceError,
    method_digest,
)

Watched = Mapping[str, Mapping[tuple[int, int], dict[str, Any]]]
"""By method, then by chain and instruction: ``time`` in microseconds, ``module``, ``samples`` of
what it computed, and ``parts`` and ``inside``, times and samples of operators in a delegate."""

_MOST_PARTS = 4096
_MOST_SAMPLES = 64


def watched_by(trace: str, program: Program) -> Watched:
    """Return the times of a program's instructions from a trace.

    Args:
        trace: JSON, as ``Profile.chrome_trace`` of lowerdeck-runner gives it.
        program: What it is a trace of, by the digests of methods in the trace; a trace
            without them is compared by the numbers and names of instructions.

    Raises:
        TraceError: It is none, or of another program.
    """
    try:
        told = json.loads(trace)
        found, names = _watched(told["traceEvents"]), _names(told["traceEvents"])
        digests = {**told.get("otherData", {}).get("digests", {})}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise TraceError(
            f"found {clip(trace, 40)!r}, expected a trace as `lowerdeck run FILE --trace OUT` "
            f"writes it ({type(error).__name__}: {error})"
        ) from error
    plans = {plan.name: plan for plan in program.execution_plan}
    if found and not plans.keys() & found.keys():
        raise TraceError(
            f"the trace is of {', '.join(map(clip, found))}, the file has "
            f"{', '.join(map(clip, sorted(plans))) or 'no method'}: take the trace of this file"
        )
    for name in plans.keys() & found.keys():
        other = _other_code(plans[name], names.get(name, {}))
        if not other and name in digests:
            here = method_digest(program, plans[name])
            if digests[name] != here:
                other = f"its digest is {clip(str(digests[name]), 40)}, that of the file {here}"
        if other:
            raise TraceError(
                f"the trace of {clip(name)!r} is of another program: {other}; take the trace of "
                "this file"
            )
    return found


def _names(events: list[dict[str, Any]]) -> dict[str, dict[tuple[int, int], str]]:
    """Return what the instructions call, by method, chain and instruction."""
    found: dict[str, dict[tuple[int, int], str]] = {}
    for event in events:
        if event["cat"] == "instruction":
            where = int(event["args"]["chain"]), int(event["args"]["instruction"])
            found.setdefault(str(event["pid"]), {})[where] = str(event["name"])
    return found


def _other_code(plan: ExecutionPlan, names: Mapping[tuple[int, int], str]) -> str:
    """Return how a trace shows that it is of other code than a method's, or nothing."""
    code = {
        (chain, index): item.instr_args
        for chain, one in enumerate(plan.chains)
        for index, item in enumerate(one.instructions)
    }
    jumps = any(isinstance(step, JumpFalseCall) for step in code.values())
    if names.keys() - code.keys() or (len(names) < len(code) and not jumps):
        return f"it tells of {len(names)} instructions, the file has {len(code)}"
    for (chain, index), name in sorted(names.items()):
        expected = _called(plan, code[chain, index])
        if expected not in ("", name):
            where = f"instruction {index}" + (f" in chain {chain}" if chain else "")
            return f"{where} calls {clip(name)}, in the file {clip(expected)}"
    return ""


def _called(plan: ExecutionPlan, step: InstructionArguments) -> str:
    """Return what an instruction calls, as a trace names it, or nothing."""
    match step:
        case KernelCall(index) if 0 <= index < len(plan.operators):
            return plan.operators[index].full_name
        case DelegateCall(index) if 0 <= index < len(plan.delegates):
            return f"{plan.delegates[index].id}[{index}]"
    return ""


def _watched(events: list[dict[str, Any]]) -> Watched:
    found: dict[str, dict[tuple[int, int], dict[str, Any]]] = {}
    for event in events:
        about = event["args"]
        where = int(about["chain"]), int(about["instruction"])
        method = found.setdefault(str(event["pid"]), {})
        one = method.setdefault(where, _nothing())
        spent = float(event["dur"])
        if not math.isfinite(spent):
            raise ValueError(f"a duration of {spent}")
        if event["cat"] == "instruction":
            # A loop runs an instruction several times.
            one["time"] += spent
            one["module"] = clip(str(about["module"]))
            one["samples"] = _samples(about)
            continue
        part = str(event["name"]).rpartition("/")[2]
        if part.isdecimal() and int(part) < _MOST_PARTS:
            parts = one["parts"]
            parts += [None] * (int(part) + 1 - len(parts))
            parts[int(part)] = (parts[int(part)] or 0.0) + spent
            one["inside"] += [[] for _ in range(len(parts) - len(one["inside"]))]
            one["inside"][int(part)] = _samples(about)
    return found


def _nothing() -> dict[str, Any]:
    return {"time": 0.0, "module": "", "samples": [], "parts": [], "inside": []}


def _samples(about: Mapping[str, Any]) -> list[float | None]:
    """Return some numbers of a result; traces of older runners have none."""
    found = [None if one is None else float(one) for one in about.get("samples", [])]
    return [one if one is None or math.isfinite(one) else None for one in found][:_MOST_SAMPLES]


def watched_entry(plan: ExecutionPlan, watched: Watched) -> list[dict[str, Any] | None] | None:
    """Return what is known of each instruction of a method, None if nothing is of any.

    Args:
        watched: Times from a trace.
    """
    told = watched.get(plan.name)
    if told is None:
        return None
    return [
        told.get((chain, index))
        for chain, one in enumerate(plan.chains)
        for index in range(len(one.instructions))
    ]
