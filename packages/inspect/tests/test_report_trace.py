"""Traces of calls: what a page shows of them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lowerdeck import inspect
from lowerdeck import serializer as pte
from lowerdeck.inspect.report.trace import watched_by, watched_entry
from lowerdeck_files.programs import add_delegates, add_program, program, tensor


def event(**changed: Any) -> dict[str, Any]:
    args = {"chain": 0, "instruction": 0, "module": "body.0"}
    one: dict[str, Any] = {"cat": "instruction", "pid": "forward", "name": "aten::add.out"}
    return {**one, "dur": 2.5, "args": args, **changed}


def trace(*events: Any, of: pte.Program | None = None) -> str:
    made = of or add_program()
    digests = {plan.name: pte.method_digest(made, plan) for plan in made.execution_plan}
    return json.dumps({"traceEvents": events, "otherData": {"digests": digests}})


def part(name: str, spent: float) -> dict[str, Any]:
    return event(cat="delegate", name=name, dur=spent)


def test_times_of_loops_add_up_and_parts_keep_their_places() -> None:
    told = watched_by(
        trace(part("A[0]/2", 1.0), part("A[0]/0", 2.0), part("A[0]/named", 9.0), event(), event()),
        add_program(),
    )
    assert told["forward"][0, 0] == {
        "time": 5.0,
        "module": "body.0",
        "samples": [],
        "parts": [2.0, None, 1.0],
        "inside": [[], [], []],
    }
    plan = add_program().execution_plan[0]
    assert watched_entry(plan, told)[0] == told["forward"][0, 0]  # type: ignore[index]
    assert watched_entry(plan, {}) is None


def test_samples_are_few_and_finite() -> None:
    samples = [1, None, float("nan"), *range(100)]
    args = {"chain": 0, "instruction": 0, "module": "", "samples": samples}
    events = event(args=args), event(cat="delegate", name="A/1", args=args)
    told = watched_by(trace(*events), add_program())
    one = told["forward"][0, 0]
    assert one["samples"] == [1.0, None, None, *map(float, range(61))]
    assert one["inside"] == [[], one["samples"]]


@pytest.mark.parametrize(
    "text",
    [
        "no JSON",
        "[]",
        "{}",
        '{"traceEvents": 3}',
        trace(3),
        trace(event(args=None)),
        trace(event(dur="long")),
        trace(event(dur=float("inf"))),
        trace(event(args={"chain": 0})),
        "[" * 100_000,
    ],
    ids=lambda text: text[:24],
)
def test_what_is_no_trace_is_one_error(text: str) -> None:
    with pytest.raises(
        pte.TraceError, match="expected a trace from `lowerdeck run FILE --trace OUT`"
    ):
        inspect.html_report(add_program(), trace=text)


def test_a_trace_of_another_program_is_refused() -> None:
    with pytest.raises(pte.TraceError, match="has the methods encode, the file has forward"):
        inspect.html_report(add_program(), trace=trace(event(pid="encode")))
    other = program([tensor((3,))], pte.MoveCall(0, 0))
    with pytest.raises(pte.TraceError, match="trace of 'forward' is of another program"):
        inspect.html_report(add_program(), trace=trace(event(), of=other))


def delegated(blob: bytes, size: int = 6, constant: bytes = bytes(24)) -> Any:
    """Return a program of one delegate: all of them have the same instruction."""
    values, call = [tensor((size,)), tensor((6,), index=1)], pte.DelegateCall(0, [0, 1, 0])
    made = program(values, call, constants=[constant], inputs=[0], outputs=[0])
    return add_delegates(made, blob, backend="A")


def test_a_digest_tells_programs_of_the_same_instructions_apart() -> None:
    made = delegated(b"a" * 200_000)
    text = trace(event(name="A[0]"), of=made)
    read = pte.deserialize_pte(pte.serialize_pte(made))
    assert '"time":2.5' in inspect.html_report(made, trace=text)
    assert '"time":2.5' in inspect.html_report(read, trace=text)
    for other in (
        delegated(b"a" * 199_999 + b"b"),
        delegated(b"b" + b"a" * 199_999),
        delegated(b"a" * 199_999),
        delegated(b"a" * 200_000, size=5),
        delegated(b"a" * 200_000, constant=b"b" * 24),
    ):
        with pytest.raises(pte.TraceError, match=r"its digest is [0-9a-f]{32}, that of the file "):
            inspect.html_report(other, trace=text)
        with pytest.raises(pte.TraceError, match="of another program"):
            inspect.html_diff(read, other, traces=(text, text))


@pytest.mark.parametrize(
    ("line", "status", "told"),
    [
        ("inspect model.pte --html a.html --trace trace.json", 0, ""),
        ("inspect model.pte --trace trace.json", 2, "--trace needs --html"),
        ("inspect model.pte --html b.html --trace gone.json", 3, "gone.json: No such file"),
        ("inspect model.pte --html b.html --trace bad.json", 3, "--trace bad.json: found '{}', e"),
        ("inspect model.pte --html trace.json --trace trace.json", 2, "is the file that --trace"),
        ("DIFF trace.json --html a.html", 0, ""),
        ("DIFF trace.json", 2, "--traces needs --html"),
        (
            "DIFF other.json --html b.html",
            3,
            "--traces: the trace has the methods encode, the file has",
        ),
        ("DIFF gone.json --html b.html", 3, "gone.json: No such file"),
        ("DIFF trace.json --html trace.json", 2, "is the file that --traces"),
    ],
)
def test_commands_take_traces_for_a_page_alone(
    line: str, status: int, told: str, tmp_path: Path, shell: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pte.write_pte(add_program(), "model.pte")
    Path("trace.json").write_text(trace(event()))
    Path("other.json").write_text(trace(event(pid="encode")))
    Path("bad.json").write_text("{}")
    diff = "diff model.pte model.pte --traces trace.json"
    assert told in shell(*line.replace("DIFF", diff).split(), status=status).err
    if status:
        assert not Path("b.html").exists()
    else:
        assert Path("a.html").read_text().count('"time":2.5') == 1 + line.startswith("DIFF")
