"""Plans that are tried, and what becomes of a runtime that fails; it runs in ``tests/interop``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lowerdeck.lowered_module import (
    LoweringError,
    Trial,
    delegation_summary,
    lower_fastest,
    to_backend,
)
from lowerdeck.lowered_module.authoring.module_partitioner import Everything
from lowerdeck.lowered_module.choosing import fastest, official_runtime, trial_lines
from lowerdeck.lowered_module.choosing.halves import Halves, narrow_places
from lowerdeck.lowered_module.choosing.official_runtime import OfficialRuntime
from lowerdeck.lowered_module.commands import lower_model
from lowerdeck.lowered_module.program.held_messages import held_messages
from lowerdeck.lowered_module.stages import Stages
from lowerdeck.lowered_module.testing import RunPartitioner
from lowerdeck.serializer import CommandError


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("import sys; sys.exit('executorch is not installed: pip install executorch')", "pip in"),
        ("import os; os.abort()", "ended with -6"),
        ("raise RuntimeError('error: 0x12')", "0x12"),
        ("pass", "ended with 0"),
    ],
)
def test_a_runtime_that_fails_is_one_error(
    program: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(official_runtime, "_PROGRAM", program)
    with OfficialRuntime() as runtime, pytest.raises(LoweringError, match=words):
        runtime.backends()


def test_a_runtime_that_says_nothing_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(official_runtime, "_PROGRAM", "import time; time.sleep(3600)")
    monkeypatch.setattr(official_runtime, "_PATIENCE", 0.05)
    with OfficialRuntime() as runtime, pytest.raises(LoweringError, match="said nothing for"):
        runtime.backends()


def test_answers_and_ends_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    program = """
import sys
for number, line in enumerate(sys.stdin):
    if not number:
        print('["A"]')
    print("ended", -11 * number, flush=True)
"""
    monkeypatch.setattr(official_runtime, "_PROGRAM", program)
    with OfficialRuntime() as runtime:
        assert runtime.backends() == ["A"]
        with pytest.raises(LoweringError, match="it ended with -11"):
            runtime.backends()
        with pytest.raises(LoweringError, match="it ended with -22"):
            runtime.backends()


def test_a_program_without_example_inputs_cannot_be_measured() -> None:
    exported = torch.export.export(torch.nn.Linear(2, 3), (torch.ones(1, 2),))
    exported.example_inputs = None
    with pytest.raises(LoweringError, match="no example inputs"):
        lower_fastest(exported, [])


def test_simple_plans_come_first_and_pairs_where_the_first_left_something() -> None:
    trials: list[Trial] = []
    plans = []
    for plan in fastest._plans(["A", "B"], trials):
        plans.append(plan)
        trials.append(Trial(plan, delegates=len(plan), left=3 if plan == ("B",) else 0))
    assert plans == [(), ("A",), ("B",), ("B", "A")]


def test_of_plans_as_fast_as_each_other_the_one_with_fewer_backends_is_taken() -> None:
    plain = Trial((), milliseconds=1.005)
    one = Trial(("A",), milliseconds=1.0)
    assert fastest._best([plain, one], [0, 1]) == 0
    slow = Trial((), milliseconds=1.02)
    assert fastest._best([slow, one], [0, 1]) == 1


def test_a_plan_of_several_backends_is_timed_once_more_beside_the_best_simple_one() -> None:
    trials = [Trial((), milliseconds=9.0), Trial(("A",), milliseconds=1.0)]
    both = Trial(("A", "B"), milliseconds=0.9)
    assert fastest._last_two([*trials, both], [0, 1, 2]) == [2, 1]
    assert not fastest._last_two([*trials, replace(both, milliseconds=1.1)], [0, 1, 2])
    assert not fastest._last_two([both], [0])


def test_the_table_is_sorted_by_time_and_says_why_not() -> None:
    lines = list(
        trial_lines(
            [
                Trial((), milliseconds=2.0, difference=0.0, left=4),
                Trial(("A", "B"), why_not="the runtime has no A"),
                Trial(("B",), milliseconds=1.0, difference=1e-7, delegates=1, chosen=True),
            ]
        )
    )
    assert lines[0].endswith("in the official ExecuTorch runtime on this machine")
    assert [line.split()[:2] for line in lines[1:]] == [
        ["*", "B"],
        ["no", "backend"],
        ["A", "then"],
    ]
    assert lines[3].endswith("the runtime has no A")


def test_the_table_gives_long_names_the_room_they_need() -> None:
    trials = [
        Trial(("XnnpackBackend", "OpenvinoBackend"), after="stages.1.blocks.1", milliseconds=1.0),
        Trial(("OpenvinoBackend",), milliseconds=20.0),
    ]
    first, second = list(trial_lines([replace(one, difference=0.0) for one in trials]))[1:]
    assert "XnnpackBackend then OpenvinoBackend after stages.1.blocks.1 " in first
    assert first.index(" ms") == second.index(" ms")


class Steps(torch.nn.Module):
    """Three steps that hand one tensor on, and one whose input is needed once more."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for step in self.steps:
            x = step(x).relu()
        return x + x.sin().cos()


def test_a_place_to_cut_hands_on_one_tensor_and_nothing_else() -> None:
    exported = torch.export.export(Steps(), (torch.ones(2, 4),))
    names = [node.name for node in narrow_places(exported)]
    assert names == ["linear", "relu", "linear_1", "relu_1", "linear_2", "relu_2"]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_each_backend_takes_its_side_of_the_cut(number: int) -> None:
    exported = torch.export.export(Steps(), (torch.ones(2, 4),))
    halves = Halves(RunPartitioner(lambda _: True), RunPartitioner(lambda _: True), number, 3)
    lowered = to_backend(exported, halves)
    assert sum(delegation_summary(lowered).delegates.values()) == 2
    assert not delegation_summary(lowered).left
    assert halves.after
    wanted = exported.module()(torch.ones(2, 4))
    assert torch.equal(lowered.module()(torch.ones(2, 4)), wanted)


def test_the_weights_of_a_half_go_with_it() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    exported = torch.export.export(model, (torch.ones(2, 64),))
    halves = Halves(Everything("ExecutorBackend"), Everything("ExecutorBackend"), 1, 1)
    result = halves(exported)
    tags = {node.name: node.meta.get("delegation_tag") for node in exported.graph.nodes}
    assert {tags["p_0_weight"], tags["p_3_weight"]} == set(result.partition_tags)
    assert tags["linear"] == tags["p_0_weight"]
    assert tags["linear_3"] == tags["p_3_weight"]


def test_a_program_of_one_call_is_not_cut() -> None:
    exported = torch.export.export(torch.nn.ReLU(), (torch.ones(2),))
    assert narrow_places(exported) == []
    halves = Halves(RunPartitioner(lambda _: True), RunPartitioner(lambda _: True), 1, 1)
    with pytest.raises(LoweringError, match="one tensor alone"):
        to_backend(exported, halves)


def test_either_half_keeps_whole_what_it_wants_whole() -> None:
    class Keeps(RunPartitioner):
        def ops_to_not_decompose(self, ep: Any) -> Any:
            return [torch.ops.aten.linear.default], lambda node: node.name == "linear_1"

    exported = torch.export.export(Steps(), (torch.ones(2, 4),))
    halves = Halves(Keeps(lambda _: True), RunPartitioner(lambda _: True), 1, 1)
    operators, wanted = halves.ops_to_not_decompose(exported)
    assert operators == [torch.ops.aten.linear.default]
    assert wanted is not None
    assert [node.name for node in exported.graph.nodes if wanted(node)] == ["linear_1"]


def test_near_backends_are_tried_together_and_far_ones_are_not() -> None:
    def trials(*times: float) -> list[Trial]:
        return [Trial((), milliseconds=9.0)] + [
            Trial((name,), milliseconds=time) for name, time in zip("ABC", times, strict=False)
        ]

    assert fastest._near_each_other(trials(2.0, 3.0, 2.5)) == ("A", "C")
    assert fastest._near_each_other(trials(2.0, 5.0)) == ()
    assert fastest._near_each_other(trials(2.0)) == ()


def test_quantising_and_choosing_are_not_asked_for_together(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="give one of them"):
        lower_model("m:f", [], tmp_path / "m.pte", quantize="int8", auto=1e-4)
    assert not list(tmp_path.iterdir())


def test_what_an_installed_partitioner_raises_is_a_reason_against_it_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lowered(program: Any, plan: list[str], **_: Any) -> Any:
        raise OSError("no such device")

    monkeypatch.setattr(fastest, "lower", lowered)
    exported = torch.export.export(torch.nn.ReLU(), (torch.ones(2),))
    trial, made = fastest._lowered(exported, ("Gone",), ["Gone"])
    assert made is None
    assert trial.why_not == "cannot be lowered: OSError: no such device"


def test_nothing_right_names_each_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_right(_: OfficialRuntime, file: Path, inputs: Any) -> tuple[list[Any], float]:
        raise LoweringError("the official runtime failed: 0x20")

    monkeypatch.setattr(OfficialRuntime, "backends", lambda _: ["Nobody"])
    monkeypatch.setattr(OfficialRuntime, "first_outputs", none_right)
    exported = torch.export.export(torch.nn.ReLU(), (torch.ones(2),))
    with pytest.raises(LoweringError, match=r"0x20; Other: the runtime has no Other"):
        lower_fastest(exported, [torch.ones(2)], backends=["Other"])


def test_a_plan_that_is_far_slower_has_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {(): 9.0, ("A",): 0.5, ("B",): 0.6}
    plans = iter(seconds)
    turns = []

    def lowered(_: Any, plan: tuple[str, ...], __: Any) -> tuple[Trial, Any]:
        return Trial(plan, delegates=len(plan)), torch.nn.Identity()

    def once(_: OfficialRuntime, __: Path, inputs: Any) -> tuple[list[Any], float]:
        return list(inputs), seconds[next(plans)]

    def in_turn(_: OfficialRuntime, files: list[Path], __: Any, rounds: int) -> list[list[float]]:
        turns.append(len(files))
        return [[0.5 + place] * rounds for place in range(len(files))]

    monkeypatch.setattr(OfficialRuntime, "backends", lambda _: ["A", "B"])
    monkeypatch.setattr(fastest, "_lowered", lowered)
    monkeypatch.setattr(OfficialRuntime, "first_outputs", once)
    monkeypatch.setattr(OfficialRuntime, "seconds_in_turn", in_turn)
    monkeypatch.setattr(
        torch.nn.Identity, "save", lambda _, file: Path(file).touch(), raising=False
    )
    exported = torch.export.export(torch.nn.ReLU(), (torch.ones(2),))
    shown = []
    _, trials = lower_fastest(
        exported,
        [torch.ones(2)],
        backends=["A", "B"],
        progress=lambda done, total, label: shown.append((done, total, label.split(", took")[0])),
    )
    assert shown == [
        (0, 15, "the runtime's own kernels, then A, B"),
        (1, 15, "no backend: right"),
        (2, 15, "A: right"),
        # Nothing was left for pairs.
        (3, 13, "B: right"),
        (3, 13, "2 of them are right and timed in turn"),
    ]
    assert turns == [2]
    assert [trial.milliseconds for trial in trials] == [9000.0, 500.0, 1500.0]
    assert [trial.backends for trial in trials if trial.chosen] == [("A",)]


def test_trials_are_told_on_standard_error_while_messages_are_held(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Stages(["measure"]) as stages, stages.stage("measure"), held_messages():
        stages.trial(1, 3, "no backend: right, took 0.5 s")
        told = capsys.readouterr()
    assert told.out == ""
    assert "  1 of at most 3: no backend: right, took 0.5 s\n" in told.err
