"""Programs and modules of another device than the CPU: a GPU where there is one, else ``meta``.

Tensors of ``meta`` have no numbers; they tell where a result lies, and that nothing came from the
CPU.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram, export
from torch.export.passes import move_to_device_pass
from unflatten_comparison import assert_equal  # type: ignore[import-not-found]

from lowerdeck.unflatten import InputConstraintError, export_preserving, unflatten

DEVICE = "cuda" if torch.cuda.is_available() else "meta"


class Positions(nn.Module):
    """Makes tensors where its argument lies."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)

    def forward(self, x: Tensor) -> Any:
        count = x.shape[1]
        mask = torch.ones(count, count, dtype=torch.bool, device=x.device).tril()
        near = torch.zeros(count, count, device=x.device).masked_fill(~mask, -1.0)
        return near @ (x + self.embedding(torch.arange(count, device=x.device)))


class Shifted(nn.Module):
    """Makes a tensor where its argument lies, and nothing else."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.ones(x.shape, device=x.device)


class Step(nn.Module):
    """Is called in two forms, and counts its calls."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor, t: float) -> Any:
        self.count.add_(1)
        return x + self.linear(x) * t


class Whole(nn.Module):
    """Has a plain tensor, a literal, modes, forms and state."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = Positions()
        self.step = Step()
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        x = self.positions(x) * torch.tensor(2.0, device=x.device)
        for t in (0.5, 0.25):
            x = self.step(x, t)
        with torch.no_grad():
            scale = self.norm(x)
        return self.head(x * scale)


def exported(how: str, eager: nn.Module, x: Tensor) -> ExportedProgram:
    if how == "preserving":
        return export_preserving(eager, (x,))
    return export(eager, (x,), strict=how == "strict")


def made_there(how: str, eager: nn.Module, x: Tensor) -> Any:
    return unflatten(exported(how, copy.deepcopy(eager).to(DEVICE), x.to(DEVICE)))


def moved_there(how: str, eager: nn.Module, x: Tensor) -> Any:
    return unflatten(move_to_device_pass(exported(how, eager, x), DEVICE))


@pytest.mark.parametrize("how", ["plain", "strict", "preserving"])
@pytest.mark.parametrize("made", [made_there, moved_there])
def test_programs_of_another_device(made: Callable[..., Any], how: str) -> None:
    eager, x = Whole(), torch.randn(2, 5, 8)
    module: Any = made(how, eager, x)
    eager, x = copy.deepcopy(eager).to(DEVICE), x.to(DEVICE)
    assert module.state_dict().keys() == eager.state_dict().keys()
    copied = copy.deepcopy(module)
    pickled = pickle.loads(pickle.dumps(module))
    for one in (module, copied, pickled):
        _same(copy.deepcopy(one), copy.deepcopy(eager), x)
    changes: list[tuple[str, nn.Module]] = [("norm", nn.LayerNorm(8))]
    changes.append(("head", nn.Sequential(nn.Linear(8, 4), nn.Tanh())))
    if how == "preserving":
        changes.append(("positions", Positions()))
    for name, other in changes:
        changed, expected = copy.deepcopy(module), copy.deepcopy(eager)
        changed.set_submodule(name, other.to(DEVICE))
        expected.set_submodule(name, other)
        _same(changed, expected, x)
    if how == "preserving":
        given = torch.randn(2, 5, 8, device=DEVICE)
        _same_values(module.positions(given), eager.positions(given))
        _same_values(module.step(given, 0.25), eager.step(given, 0.25))
        with pytest.raises(InputConstraintError):
            module.step(given, 0.75)
    compiled: Any = torch.compile(module, fullgraph=True, backend="eager")
    _same_values(compiled(x), module(x))


@pytest.mark.parametrize("how", ["plain", "strict", "preserving"])
def test_a_module_of_the_cpu_is_moved(how: str) -> None:
    eager = nn.Sequential(nn.Conv1d(5, 5, 1), nn.BatchNorm1d(5), nn.Linear(8, 8), nn.ReLU())
    x = torch.randn(2, 5, 8)
    module: Any = unflatten(exported(how, eager, x))
    module, eager, x = module.to(DEVICE), eager.to(DEVICE), x.to(DEVICE)
    _same(module, eager, x)
    module.set_submodule("3", nn.Tanh())
    eager[3] = nn.Tanh()
    _same(module, eager, x)


def test_what_was_made_on_the_cpu_is_named_with_the_line_of_the_model() -> None:
    """The program has the device, where eager asks its argument."""
    x = torch.randn(2, 5)
    module = unflatten(export(Shifted(), (x,)))
    with pytest.raises(RuntimeError, match=r"(?s)cpu.*test_another_device.py:\d+"):
        module.to(DEVICE)(x.to(DEVICE))


def _same(module: Any, eager: nn.Module, x: Tensor) -> None:
    """Compare results, gradients and state after a call."""
    found, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
    one, other = module(found), eager(expected)
    _same_values(one, other)
    one.sum().backward()
    other.sum().backward()
    _same_values(found.grad, expected.grad)
    for name, value in eager.state_dict().items():
        _same_values(module.state_dict()[name], value)


def _same_values(found: Any, expected: Any) -> None:
    assert found.device == expected.device
    assert found.shape == expected.shape
    if DEVICE != "meta":
        assert_equal(found, expected, 1e-5)
