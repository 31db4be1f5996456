"""The fastest of several lowerings, in the official runtime."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lowerdeck.lowered_module import LoweringError, lower, lower_fastest
from lowerdeck.lowered_module.choosing import official_runtime
from lowerdeck.lowered_module.choosing.official_runtime import OfficialRuntime
from lowerdeck.lowered_module.commands import lower_model
from lowerdeck_zoo import official

pytestmark = pytest.mark.skipif(not official.available(), reason=official.REASON)


class Convolved(nn.Module):
    """A convolution, and a sort in between that no backend takes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.first(x).relu().topk(16, dim=1).values
        return self.second(made).mean((2, 3))


class Counted(nn.Module):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(4))
        self.dense = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return self.dense(x) + self.calls


def convolved() -> tuple[nn.Module, tuple[torch.Tensor]]:
    torch.manual_seed(0)
    return Convolved().eval().requires_grad_(False), (torch.randn(1, 3, 40, 40),)


def counted() -> tuple[nn.Module, tuple[torch.Tensor]]:
    torch.manual_seed(0)
    return Counted().eval().requires_grad_(False), (torch.randn(2, 4),)


def test_the_fastest_is_kept_and_all_that_was_tried_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds_in_turn = OfficialRuntime.seconds_in_turn

    def in_turn(
        runtime: OfficialRuntime, files: list[Path], inputs: list[Any], rounds: int
    ) -> list[list[float]]:
        # Really timed, but no test depends on how long it took: later plans are the faster ones.
        real = seconds_in_turn(runtime, files, inputs, rounds)
        assert [len(samples) for samples in real] == [rounds] * len(files)
        assert all(second > 0 for samples in real for second in samples)
        return [[1e-9 / (1 + int(file.stem))] * rounds for file in files]

    monkeypatch.setattr(OfficialRuntime, "seconds_in_turn", in_turn)
    model, inputs = convolved()
    exported = torch.export.export(model, inputs)
    lowered, trials = lower_fastest(exported, [model(*inputs)], backends=["XnnpackBackend", "No"])
    by = {trial.backends: trial for trial in trials}
    assert set(by) == {(), ("XnnpackBackend",), ("No",), ("XnnpackBackend", "No")}
    assert "has no No" in by["No",].why_not
    (chosen,) = [trial for trial in trials if trial.chosen]
    assert chosen.backends == ("XnnpackBackend",)
    assert chosen.delegates == 2
    assert chosen.left > 0
    assert chosen.milliseconds < by[()].milliseconds
    lowered.save(tmp_path / "model.pte")
    assert (tmp_path / "model.pte").stat().st_size == chosen.file_bytes
    outcome = official.run(tmp_path / "model.pte", [official.Call(inputs)])
    assert isinstance(outcome, official.Ran), outcome
    torch.testing.assert_close(outcome.outputs[0][0], model(*inputs), atol=1e-4, rtol=1e-4)


def test_a_program_is_cut_between_backends_that_are_near_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("openvino")

    seconds_in_turn = OfficialRuntime.seconds_in_turn

    def in_turn(
        runtime: OfficialRuntime, files: list[Path], inputs: list[Any], rounds: int
    ) -> list[list[float]]:
        # Really run; all are near each other, and the last cut is the fastest.
        assert all(seconds_in_turn(runtime, files, inputs, 1))
        return [[1.0 - 0.02 * int(file.stem)] for file in files]

    monkeypatch.setattr(OfficialRuntime, "seconds_in_turn", in_turn)
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.ReLU(inplace=True)) for _ in range(4)]
    model, inputs = nn.Sequential(*layers).eval().requires_grad_(False), (torch.randn(2, 32),)
    exported = torch.export.export(model, inputs)
    names = ["XnnpackBackend", "OpenvinoBackend"]
    lowered, trials = lower_fastest(exported, [model(*inputs)], backends=names, cuts=1)
    cut = [(trial.backends, trial.after) for trial in trials if trial.after]
    assert {backends for backends, _ in cut} == {tuple(names), tuple(reversed(names))}
    assert len(cut) == 2
    (chosen,) = [trial for trial in trials if trial.chosen]
    assert chosen.after
    assert (chosen.delegates, chosen.left) == (2, 0)
    lowered.save(tmp_path / "model.pte")
    outcome = official.run(tmp_path / "model.pte", [official.Call(inputs)])
    assert isinstance(outcome, official.Ran), outcome
    torch.testing.assert_close(outcome.outputs[0][0], model(*inputs), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("forks", [True, False])
def test_one_process_loads_the_runtime_for_all_files_and_outlives_those_that_end_it(
    forks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not forks:
        without = f"import os; del os.fork; {official_runtime._PROGRAM}"
        monkeypatch.setattr(official_runtime, "_PROGRAM", without)
        monkeypatch.setattr(official_runtime, "_FORKS", False)
    started = []
    start = official_runtime._started
    monkeypatch.setattr(official_runtime, "_started", lambda log: started.append(1) or start(log))
    model, inputs = convolved()
    exported = torch.export.export(model, inputs)
    good, bad, gone = (tmp_path / name for name in ("good.pte", "bad.pte", "gone.pte"))
    lower(exported, ["XnnpackBackend"]).save(good)
    bad.write_bytes(good.read_bytes()[:200])
    with OfficialRuntime() as runtime:
        assert "XnnpackBackend" in runtime.backends()
        for _ in range(2):
            (found,), seconds = runtime.first_outputs(good, inputs)
            torch.testing.assert_close(found, model(*inputs), atol=1e-4, rtol=1e-4)
            assert seconds > 0
            for file in (bad, gone):
                with pytest.raises(LoweringError, match="the official runtime failed: Ru"):
                    runtime.first_outputs(file, inputs)
            with pytest.raises(LoweringError, match="the official runtime failed: "):
                runtime.first_outputs(good, [])
        assert len(runtime.seconds_in_turn([good, good], inputs, 2)) == 2
    assert len(started) == (1 if forks else 10)


def test_the_runtime_is_loaded_without_what_it_does_not_need() -> None:
    # What only exir needs may be missing: `pip install --no-deps executorch` brings none of it.
    program = (
        "import sys\n"
        "from lowerdeck.serializer import official_binding, official_binding_name\n"
        "assert official_binding_name()\n"
        "assert not any('portable_lib' in name for name in sys.modules)\n"
        "print(official_binding()['_get_registered_backend_names']())\n"
        "assert 'executorch.exir' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert "XnnpackBackend" in done.stdout


def test_a_model_begins_with_its_own_state_whatever_was_tried(tmp_path: Path) -> None:
    output = tmp_path / "model.pte"
    figures = lower_model(f"{__name__}:counted", [], output, auto=1e-4, check=False)
    assert sum("*" in line for line in figures.trials) == 1
    model, inputs = counted()
    outcome = official.run(output, [official.Call(inputs), official.Call(inputs)])
    assert isinstance(outcome, official.Ran), outcome
    for found in outcome.outputs:
        torch.testing.assert_close(found[0], model(*inputs), atol=1e-4, rtol=1e-4)


def test_nothing_is_written_where_nothing_is_right(tmp_path: Path) -> None:
    model, inputs = convolved()
    exported = torch.export.export(model, inputs)
    with pytest.raises(LoweringError, match="no backend: differs from eager by"):
        lower_fastest(exported, [model(*inputs) + 1], backends=[])
