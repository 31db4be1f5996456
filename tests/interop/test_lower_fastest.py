"""The fastest of several lowerings, in the official runtime."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from lowerdeck.lowered_module import LoweringError, lower_fastest
from lowerdeck.script import main
from lowerdeck_zoo import Holding, exported, official


class Convolved(nn.Module):
    """A convolution, and a sort in between that no backend takes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.first(x).relu().topk(16, dim=1).values
        return self.second(made).mean((2, 3))


class Counted(Holding, calls=lambda: torch.zeros(4), dense=lambda: nn.Linear(4, 4)):
    """Counts its calls."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return self.dense(x) + self.calls


def counted() -> tuple[nn.Module, tuple[torch.Tensor]]:
    torch.manual_seed(0)
    return Counted().eval().requires_grad_(False), (torch.randn(2, 4),)


def assert_right(path: Path, model: nn.Module, inputs: tuple[torch.Tensor], calls: int) -> None:
    outputs = official.outputs(path, [inputs] * calls)
    for (found,) in outputs:
        torch.testing.assert_close(found, model(*inputs), atol=1e-4, rtol=1e-4)


def test_the_fastest_is_kept_and_nothing_where_nothing_is_right(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = Convolved().eval().requires_grad_(False), (torch.randn(1, 3, 40, 40),)
    program, names = exported(model, *inputs), ["XnnpackBackend", "No"]
    if importlib.util.find_spec("openvino") is not None:
        names.append("OpenvinoBackend")
    lowered, trials = lower_fastest(program, [model(*inputs)], backends=names)
    by = {trial.name: trial for trial in trials}
    assert by.keys() == {"no backend", *names}
    assert "has no backend No" in by["No"].outcome
    assert by["XnnpackBackend"].outcome.startswith("2 delegates, ")
    (chosen,) = [trial for trial in trials if trial.chosen]
    times = [trial.milliseconds for trial in trials if trial.is_right]
    assert 0 < chosen.milliseconds <= 1.02 * max(by["no backend"].milliseconds, min(times))
    lowered.save(tmp_path / "model.pte")
    assert_right(tmp_path / "model.pte", model, inputs, 1)
    with pytest.raises(LoweringError, match="no backend: differs from eager by"):
        lower_fastest(program, [model(*inputs) + 1], backends=[])


def test_a_model_begins_with_its_own_state_whatever_was_tried(tmp_path: Path) -> None:
    output = tmp_path / "model.pte"
    assert main(["lower", f"{__name__}:counted", "--auto", "-o", str(output)]) == 0
    assert_right(output, *counted(), 2)


def test_the_runtime_is_loaded_without_what_it_does_not_need() -> None:
    # What only exir needs may be missing: `pip install --no-deps executorch` brings none of it.
    program = (
        "import sys\n"
        "from lowerdeck.runner import official_binding, official_binding_name\n"
        "assert official_binding_name()\n"
        "assert not any('portable_lib' in name for name in sys.modules)\n"
        "assert 'XnnpackBackend' in official_binding()['_get_registered_backend_names']()\n"
        "assert 'executorch.exir' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
