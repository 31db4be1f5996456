"""Profiles: events with times, values and lines of code; tables and Chrome traces."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import pytest
import torch

from lowerdeck.runner import DelegateLog, Event, Profile, load
from lowerdeck.serializer import Frame, FrameList, method_digest, write_pte


@dataclass
class Source:
    handles: tuple[int, ...]
    node: str = ""
    source_line: str = ""
    module_path: str = ""
    operator: str = ""


@dataclass
class DelegateSource:
    debug_handle_map: dict[Any, Any]
    sources: dict[int, Source] = field(default_factory=dict)


@dataclass
class Maps:
    debug_handle_map: dict[str, dict[int, Any]] = field(default_factory=dict)
    delegate_debug_maps: dict[str, dict[int, Any]] = field(default_factory=dict)


class TwoSteps:
    def init(self, blob: memoryview, compile_specs: Any, named_data: Any) -> None:
        return None

    def input_count(self, handle: None) -> int:
        return 1

    def execute(self, handle: None, inputs: Sequence[Any]) -> list[Any]:
        return [(inputs[0] + 1) * 2]

    def execute_logged(
        self, handle: None, inputs: Sequence[Any], log: DelegateLog
    ) -> Sequence[torch.Tensor]:
        start = perf_counter_ns()
        middle = inputs[0] + 1
        log("add", start, perf_counter_ns(), [middle])
        start = perf_counter_ns()
        result = middle * 2
        log(1, start, perf_counter_ns(), [result], "Multiply")
        return [result]


def two_instructions(m: Any) -> Any:
    x, middle, out = m.tensor([2]), m.tensor([2]), m.tensor([2])
    m.call("aten::relu.out", x, middle, middle)
    m.delegate("TwoSteps", [middle, out])
    return m.ends([x], [out])


def test_events_tell_what_ran_and_what_it_gave(method: Any) -> None:
    program = load(two_instructions(method), backends={"TwoSteps": TwoSteps()})
    profile = program.run("forward", torch.tensor([-1.0, 2.0]), profile=True)
    assert [event.name for event in profile.events] == [
        "aten::relu.out",
        "TwoSteps[0]/add",
        "TwoSteps[0]/1",
        "TwoSteps[0]",
    ]
    assert [event.label for event in profile.events] == ["", "", "Multiply", ""]
    assert [event.backend for event in profile.events] == ["", *["TwoSteps"] * 3]
    assert "TwoSteps[0]/1 Multiply" in profile.table()
    assert "TwoSteps[0]/Multiply" in profile.table(by_name=True)
    assert '"label": "Multiply"' in profile.chrome_trace()
    values = [event.values[0].tolist() for event in profile.events]
    assert values == [[0.0, 2.0], [1.0, 3.0], [2.0, 6.0], [2.0, 6.0]]
    assert profile.result[0].tolist() == [2.0, 6.0]
    assert all(event.duration_ns >= 0 for event in profile.events)
    inner, outer = profile.events[1], profile.events[3]
    assert outer.start_ns <= inner.start_ns
    assert inner.start_ns + inner.duration_ns <= outer.start_ns + outer.duration_ns


def test_lines_come_from_the_maps_of_the_emission(method: Any) -> None:
    maps = Maps(
        {"forward": {0: Source((3,), "relu", 'File "m.py", line 4, in forward', "act")}},
        {
            "forward": {
                1: DelegateSource(
                    {"add": (5, 6), 1: 7},
                    {5: Source((5,), "add", "line 5", "body"), 7: Source((7,), "mul", "line 7")},
                )
            }
        },
    )
    program = load(two_instructions(method), backends={"TwoSteps": TwoSteps()}, debug=maps)
    relu, add, mul, whole = program.run("forward", torch.ones(2), profile=True).events
    assert (relu.place.handles, relu.place.node, relu.place.module_path) == ((3,), "relu", "act")
    assert (add.place.handles, add.place.source_line) == ((5, 6), "line 5")
    assert (mul.place.handles, mul.place.node) == ((7,), "mul")
    assert whole.place.handles == ()


def test_lines_come_from_the_stack_traces_of_the_file_otherwise(method: Any) -> None:
    program = two_instructions(method)
    frames = [Frame("a.py", 1, "outer", ""), Frame("b.py", 2, "inner", "")]
    frames.append(Frame("/any/site-packages/torch/nn/modules/linear.py", 134, "forward", ""))
    method.plan.chains[0].stacktrace = [FrameList(frames), FrameList([])]
    loaded = load(program, backends={"TwoSteps": TwoSteps()})
    events = loaded.run("forward", torch.ones(2), profile=True).events
    assert events[0].place.source_line == 'File "b.py", line 2, in inner'
    assert events[-1].place.source_line == ""


def test_a_loop_gives_an_event_for_every_round(method: Any) -> None:
    index, done = method.integer(0), method.boolean(False)
    zero, one, three = method.integer(0), method.integer(1), method.integer(3)
    method.call("executorch_prim::add.Scalar", zero, zero, index)
    method.call("executorch_prim::add.Scalar", index, one, index)
    method.call("executorch_prim::eq.Scalar", index, three, done)
    method.jump(done, 1)
    profile = load(method.ends([], [index])).method().profile()
    assert profile.result == [3]
    assert [event.instruction for event in profile.events] == [0, *[1, 2, 3] * 3]
    assert [event.values for event in profile.events if event.instruction == 1] == [
        (1,),
        (2,),
        (3,),
    ]


def test_tables_are_in_order_or_by_time(method: Any) -> None:
    program = load(two_instructions(method), backends={"TwoSteps": TwoSteps()})
    profile = program.method().profile(torch.ones(2))
    lines = profile.table().splitlines()
    assert lines[0].split() == ["#", "us", "%", "operator", "shape", "module", "source"]
    assert "aten::relu.out" in lines[1]
    assert "float32[2]" in lines[1]
    assert len(lines) == 5
    assert len(profile.table(limit=2).splitlines()) == 3
    assert profile.table(by_name=True).splitlines()[0].split() == ["calls", "us", "%", "operator"]


def test_the_trace_is_what_chrome_reads(method: Any, tmp_path: Path) -> None:
    program = load(two_instructions(method), backends={"TwoSteps": TwoSteps()})
    profile = program.method().profile(torch.ones(2), values=False)
    assert all(event.values == () for event in profile.events)
    path = tmp_path / "trace.json"
    profile.save_trace(path)
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    assert [event["name"] for event in events] == [event.name for event in profile.events]
    assert {event["ph"] for event in events} == {"X"}
    assert {event["cat"] for event in events} == {"instruction", "delegate"}
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in events)


@pytest.mark.parametrize(
    ("value", "samples"),
    [
        (torch.tensor([1.0, float("nan"), float("-inf")]), [1.0, None, None]),
        (torch.arange(1000), [float(16 * one) for one in range(63)]),
        (torch.tensor(7, dtype=torch.uint8), [7.0]),
        (torch.tensor([True, False]), [1.0, 0.0]),
        (torch.zeros(0), []),
        (torch.zeros(2, dtype=torch.complex64), []),
        (3, []),
    ],
)
def test_a_trace_holds_some_numbers_of_each_result(value: Any, samples: list[Any]) -> None:
    event = Event(0, 0, "aten::relu.out", 0, 1, values=(value,))
    trace = json.loads(Profile("forward", None, (event, Event(0, 1, "move", 1, 1))).chrome_trace())
    assert [one["args"]["samples"] for one in trace["traceEvents"]] == [samples, []]


def test_a_trace_carries_the_digest_of_its_method(method: Any, tmp_path: Path) -> None:
    program = two_instructions(method)
    path = tmp_path / "a.pte"
    write_pte(program, path)
    (digest,) = {
        load(source, backends={"TwoSteps": TwoSteps()}).method().profile(torch.ones(2)).digest
        for source in (program, path)
    }
    assert digest == method_digest(program, program.execution_plan[0])
    profile = load(path, backends={"TwoSteps": TwoSteps()}).method().profile(torch.ones(2))
    assert json.loads(profile.chrome_trace())["otherData"] == {"digests": {"forward": digest}}
