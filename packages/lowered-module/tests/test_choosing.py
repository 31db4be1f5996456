"""The fastest lowering is kept, with a stand-in for the official runtime that tells its times.

``tests/interop`` measures in the official runtime itself.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lowered_helpers import backend, delegates, everything, install
from torch import nn

from lowerdeck.lowered_module import LoweredProgram, LoweringError, Trial, lower_fastest
from lowerdeck_zoo import Holding, Of, exported

RUNTIME = """
import json, os, sys, time, torch
PLAN = json.load(open(os.environ["FAKE_PLAN"]))
exec(PLAN["at import"])
now = 0.0
time.perf_counter = lambda: now

def _get_registered_backend_names():
    return PLAN["backends"]

class _load_for_executorch:
    def __init__(self, path):
        content = open(path, "rb").read()
        self.key = " ".join(name for name in PLAN["backends"] if name.encode() in content)

    def run_method(self, method, inputs):
        global now
        now += PLAN["seconds"][self.key]
        exec(PLAN["calls"].get(self.key, ""))
        return torch.load(PLAN["outputs"])
"""
A, B = "FirstBackend", "SecondBackend"
Runtime = Callable[..., tuple[LoweredProgram, list[Trial]]]


class Steps(Holding, steps=lambda: nn.ModuleList(nn.Linear(4, 4) for _ in range(3))):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for step in self.steps:
            x = step(x).relu()
        return x + x.sin().cos()


@pytest.fixture
def choose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    """A function that chooses the fastest lowering of a model, given the seconds of each file."""
    pytest.importorskip("lowerdeck.runner")
    folder = tmp_path / "executorch" / "extension" / "pybindings"
    folder.mkdir(parents=True)
    for one in (folder, *folder.parents[:2]):
        (one / "__init__.py").touch()
    (folder / "_portable_lib.py").write_text(RUNTIME)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("FAKE_PLAN", str(tmp_path / "plan"))

    def run(
        model: nn.Module,
        seconds: dict[str, float],
        *,
        calls: dict[str, str] | None = None,
        at_import: str = "",
        partitioners: dict[str, Any] | None = None,
        **options: Any,
    ) -> tuple[LoweredProgram, list[Trial]]:
        inputs = (torch.ones(2, 4),)
        program = exported(model, *inputs)
        wanted = [model(*inputs).detach()]
        torch.save(wanted, tmp_path / "outputs")
        plan = {"backends": [A, B], "seconds": seconds, "calls": calls or {}}
        more = {"at import": at_import, "outputs": str(tmp_path / "outputs")}
        (tmp_path / "plan").write_text(json.dumps(plan | more))
        chosen = {name: lambda name=name: everything(name) for name in (A, B)}
        install(monkeypatch, "lowerdeck.partitioners", chosen | (partitioners or {}))
        return lower_fastest(program, wanted, **options)

    with backend(lambda *_: b"", A), backend(lambda *_: b"", B):
        yield run


def times(trials: list[Trial]) -> dict[str, float]:
    return {one.name: one.milliseconds for one in trials}


def chosen(trials: list[Trial]) -> str:
    (name,) = [one.name for one in trials if one.chosen]
    return name


def test_each_backend_is_tried_and_the_fastest_kept(choose: Runtime) -> None:
    shown: list[str] = []
    lowered, trials = choose(
        Steps(),
        {"": 0.009, A: 0.003, B: 0.001},
        progress=lambda done, total, label: shown.append(
            f"{done}/{total} {label.split(', took')[0]}"
        ),
    )
    assert shown == [
        f"0/3 the runtime's own kernels, then {A}, {B}",
        "1/3 no backend: right",
        f"2/3 {A}: right",
        f"3/3 {B}: right",
    ]
    assert times(trials) == pytest.approx({"no backend": 9, A: 3, B: 1})
    assert chosen(trials) == B
    assert {one.backend_id for one in delegates(lowered.programs["forward"])} == {B}


def test_a_backend_must_be_faster_than_none_by_a_hundredth(choose: Runtime) -> None:
    for own, name in ((1.005, "no backend"), (1.02, A)):
        _, trials = choose(Steps(), {"": own, A: 1.0, B: 9.0})
        assert chosen(trials) == name


def test_what_fails_is_a_reason_against_one_backend_alone(choose: Runtime) -> None:
    def broken() -> Any:
        raise OSError("no such device")

    calls = {"": "raise RuntimeError('error: 0x12')", A: "os.abort()"}
    _, trials = choose(
        Steps(),
        {"": 1.0, A: 1.0, B: 1.0},
        calls=calls,
        partitioners={"Other": broken},
        backends=[A, B, "Other"],
    )
    assert chosen(trials) == B
    reasons = {one.name: one.outcome for one in trials if not one.is_right}
    assert "0x12" in reasons["no backend"]
    assert "its process ended with -6" in reasons[A]
    assert reasons["Other"] == "the runtime has no backend Other"
    _, trials = choose(Steps(), {"": 1.0, B: 1.0}, partitioners={A: broken})
    assert "cannot be lowered: OSError: no such device" in trials[1].outcome
    lines = sorted(trials, key=lambda one: one.milliseconds)
    assert str(lines[0]).startswith("* no backend")
    assert str(lines[-1]).endswith("no such device")


@pytest.mark.parametrize(
    ("at_import", "calls", "words"),
    [
        ("sys.exit('executorch is not installed: pip install executorch')", "", "pip install"),
        ("os.abort()", "", "ended with -6"),
        ("raise RuntimeError('error: 0x12')", "", "0x12"),
        ("os._exit(0)", "", "ended with 0"),
        ("time.sleep(3600)", "", "no response within"),
        ("", "raise RuntimeError('0x20')", "no lowering has correct outputs: no backend: .*0x20"),
    ],
)
def test_a_runtime_that_fails_is_one_error(
    choose: Runtime, at_import: str, calls: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "sleep" in at_import:
        timer = threading.Timer
        monkeypatch.setattr(threading, "Timer", lambda _, function: timer(0.05, function))
    with pytest.raises(LoweringError, match=words):
        choose(Of(torch.relu), {"": 1.0}, at_import=at_import, calls={"": calls}, backends=[])


def test_a_program_without_example_inputs_cannot_be_measured() -> None:
    program = exported(nn.Linear(2, 3), torch.ones(1, 2))
    program.example_inputs = None
    with pytest.raises(LoweringError, match="no example inputs"):
        lower_fastest(program, [])
