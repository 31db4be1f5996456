"""Traces of calls: what a page shows of them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from serializer_programs import add_program  # type: ignore[import-not-found]

from lowerdeck import serializer as pte
from lowerdeck.script import main
from lowerdeck.serializer import (
    TraceError,
    deserialize_pte,
    html_diff,
    html_report,
    method_digest,
    serialize_pte,
    write_pte,
)
from lowerdeck.serializer.report.trace import watched_by, watched_entry


def event(**changed: Any) -> dict[str, Any]:
    args = {"chain": 0, "instruction": 0, "module": "body.0"}
    one: dict[str, Any] = {"cat": "instruction", "pid": "forward", "name": "aten::add.out"}
    return {**one, "dur": 2.5, "args": args, **changed}


def trace(*events: Any) -> str:
    return json.dumps({"traceEvents": events})


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
    with pytest.raises(TraceError, match="expected a trace as `lowerdeck run FILE --trace OUT`"):
        html_report(add_program(), trace=text)


def test_a_trace_of_another_program_is_refused() -> None:
    with pytest.raises(TraceError, match="is of encode, the file has forward"):
        html_report(add_program(), trace=trace(event(pid="encode")))
    args = {"chain": 0, "instruction": 77, "module": ""}
    for events, told in (
        ([event(), event(args=args)], "tells of 2 instructions, the file has 1"),
        ([part("A[0]/0", 1.0)], "tells of 0 instructions, the file has 1"),
        (
            [event(name="aten::mul.out")],
            "instruction 0 calls aten::mul.out, in the file aten::add",
        ),
    ):
        with pytest.raises(
            TraceError, match=f"trace of 'forward' is of another program: .*{told}"
        ):
            html_report(add_program(), trace=trace(*events))


def delegated(blob: bytes, size: int = 6, constant: bytes = bytes(24)) -> pte.Program:
    """Return a program of one delegate: all of them have the same instruction."""
    tensor = pte.Tensor(pte.ScalarType.FLOAT, sizes=[size], dim_order=[0])
    stored = pte.Tensor(pte.ScalarType.FLOAT, sizes=[6], dim_order=[0], data_buffer_idx=1)
    delegate = pte.BackendDelegateDataReference(pte.DataLocation.INLINE, 0)
    plan = pte.ExecutionPlan(
        "forward",
        values=[pte.EValue(tensor), pte.EValue(stored)],
        inputs=[0],
        outputs=[0],
        chains=[pte.Chain(instructions=[pte.Instruction(pte.DelegateCall(0, [0, 1, 0]))])],
        delegates=[pte.BackendDelegate("A", delegate)],
        non_const_buffer_sizes=[0],
    )
    return pte.Program(
        execution_plan=[plan],
        constant_buffer=[pte.Buffer(b""), pte.Buffer(constant)],
        backend_delegate_data=[pte.BackendDelegateInlineData(blob)],
    )


def test_a_digest_tells_programs_of_the_same_instructions_apart() -> None:
    program = delegated(b"a" * 200_000)
    taken = {"digests": {"forward": method_digest(program, program.execution_plan[0])}}
    text = json.dumps({"traceEvents": [event(name="A[0]")], "otherData": taken})
    read = deserialize_pte(serialize_pte(program))
    assert '"time":2.5' in html_report(program, trace=text)
    assert '"time":2.5' in html_report(read, trace=text)
    for other in (
        delegated(b"a" * 199_999 + b"b"),
        delegated(b"b" + b"a" * 199_999),
        delegated(b"a" * 199_999),
        delegated(b"a" * 200_000, size=5),
        delegated(b"a" * 200_000, constant=b"b" * 24),
    ):
        assert '"time":2.5' in html_report(other, trace=trace(event(name="A[0]")))
        with pytest.raises(TraceError, match=r"its digest is [0-9a-f]{32}, that of the file "):
            html_report(other, trace=text)
        with pytest.raises(TraceError, match="of another program"):
            html_diff(read, other, traces=(text, text))


def test_the_command_takes_a_trace_for_a_page_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_pte(add_program(), "model.pte")
    Path("trace.json").write_text(trace(event()))
    Path("other.json").write_text("{}")
    assert main(["inspect", "model.pte", "--html", "a.html", "--trace", "trace.json"]) == 0
    assert '"time":2.5' in Path("a.html").read_text()
    for words, status, told in (
        (["--trace", "trace.json"], 2, "--trace is for the page of --html"),
        (["--html", "b.html", "--trace", "gone.json"], 3, "gone.json: No such file"),
        (["--html", "b.html", "--trace", "other.json"], 3, "--trace other.json: found '{}', exp"),
        (["--html", "trace.json", "--trace", "trace.json"], 2, "is the file that --trace"),
    ):
        assert main(["inspect", "model.pte", *words]) == status
        assert told in capsys.readouterr().err
    assert not Path("b.html").exists()


def test_diff_takes_a_trace_of_each_for_a_page_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_pte(add_program(), "model.pte")
    Path("trace.json").write_text(trace(event()))
    Path("other.json").write_text(trace(event(pid="encode")))
    words = ["diff", "model.pte", "model.pte", "--traces", "trace.json"]
    assert main([*words, "trace.json", "--html", "a.html"]) == 0
    assert Path("a.html").read_text().count('"time":2.5') == 2
    for more, status, told in (
        (["trace.json"], 2, "--traces is for the page of --html"),
        (["other.json", "--html", "b.html"], 3, "--traces: the trace is of encode, the file has"),
        (["gone.json", "--html", "b.html"], 3, "gone.json: No such file"),
        (["trace.json", "--html", "trace.json"], 2, "is the file that --traces"),
    ):
        assert main([*words, *more]) == status
        assert told in capsys.readouterr().err
    assert not Path("b.html").exists()
