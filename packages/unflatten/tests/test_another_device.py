"""Programs and modules of another device than the CPU: a GPU where there is one, else ``meta``.

Tensors of ``meta`` have no numbers; they show where a result is, and that nothing came from the
CPU.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import export
from torch.export.passes import move_to_device_pass
from unflatten_zoo.judges import assert_same  # type: ignore[import-not-found]

from lowerdeck.unflatten import export_preserving, unflatten

DEVICE = "cuda" if torch.cuda.is_available() else "meta"
RECORDS: dict[str, Any] = {"plain": export, "preserving": export_preserving}


class Positions(nn.Module):
    """Makes tensors on the device of its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)

    def forward(self, x: Tensor) -> Any:
        count = x.shape[1]
        mask = torch.ones(count, count, dtype=torch.bool, device=x.device).tril()
        near = torch.zeros(count, count, device=x.device).masked_fill(~mask, -1.0)
        return near @ (x + self.embedding(torch.arange(count, device=x.device)))


class Step(nn.Module):
    """Is called in two specializations, and counts its calls."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor, t: float) -> Any:
        self.count.add_(1)
        return x + self.linear(x) * t


class Whole(nn.Module):
    """Has a plain tensor, a literal, modes, specializations and state."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.step = Positions(), Step()
        self.norm, self.head, self.plain = nn.LayerNorm(8), nn.Linear(8, 4), torch.ones(8)

    def forward(self, x: Tensor) -> Any:
        x = self.positions(x) * torch.tensor(2.0, device=x.device)
        for t in (0.5, 0.25):
            x = self.step(x, t)
        with torch.no_grad():
            scale = self.norm(x)
        return self.head(x * scale)


@pytest.mark.parametrize("how", RECORDS)
@pytest.mark.parametrize("is_moved", [False, True])
def test_programs_of_another_device(is_moved: bool, how: str) -> None:
    eager, x = Whole(), torch.randn(2, 5, 8)
    there, given = copy.deepcopy(eager).to(DEVICE), x.to(DEVICE)
    if is_moved:
        module = unflatten(move_to_device_pass(RECORDS[how](eager, (x,)), DEVICE))
    else:
        module = unflatten(RECORDS[how](copy.deepcopy(there), (given,)))
    for one in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), module):
        _compare(one, copy.deepcopy(there), given)
    if how == "preserving":
        for name, other in (("norm", nn.LayerNorm(8)), ("positions", Positions())):
            changed, expected = copy.deepcopy(module), copy.deepcopy(there)
            changed.set_submodule(name, other.to(DEVICE))
            expected.set_submodule(name, other)
            _compare(changed, expected, given)
    compiled: Any = torch.compile(module, fullgraph=True, backend="eager")
    _compare_values(compiled(given), module(given))


@pytest.mark.parametrize("how", RECORDS)
def test_a_module_of_the_cpu_is_moved(how: str) -> None:
    eager = nn.Sequential(nn.Conv1d(5, 5, 1), nn.BatchNorm1d(5), nn.Linear(8, 8), nn.ReLU())
    x = torch.randn(2, 5, 8)
    module = unflatten(RECORDS[how](eager, (x,)))
    _compare(module.to(DEVICE), eager.to(DEVICE), x.to(DEVICE))


def _compare(module: Any, eager: nn.Module, x: Tensor) -> None:
    """Compare results, gradients and state after a call."""
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    for subject, given in ((module, mine), (eager, theirs)):
        subject(given).sum().backward()
    _compare_values(mine.grad, theirs.grad)
    for name, value in eager.state_dict().items():
        _compare_values(module.state_dict()[name], value)


def _compare_values(found: Any, expected: Any) -> None:
    assert (found.device, found.shape) == (expected.device, expected.shape)
    if DEVICE != "meta":
        assert_same(found, expected, 1e-5)
