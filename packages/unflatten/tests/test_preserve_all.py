"""``preserve="all"``: every child of a plain export can be called alone, with flat tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowerdeck.unflatten import UnflattenError, UnsupportedProgramError, unflatten


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        return torch.mul(self.weight, wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True)))


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm()
        self.project = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length, _ = x.shape
        split = self.project(self.norm(x)).view(batch, length, 2, 4).transpose(1, 2)
        if mask is not None:
            split = split * mask
        return torch.add(x, split.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Heads()
        self.second = Heads()
        self.last = nn.Sequential(nn.Linear(8, 4), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], 1).tril()[:, :1]
        result: Tensor = self.last(self.second(self.first(x), mask=mask))
        return result


X = torch.linspace(-1, 1, 48).view(2, 3, 8)


@pytest.fixture(scope="module")
def program() -> torch.export.ExportedProgram:
    torch.manual_seed(0)
    sizes = {
        0: torch.export.Dim("rows", min=2, max=9),
        1: torch.export.Dim("length", min=2, max=9),
    }
    return torch.export.export(Model().eval(), (X,), dynamic_shapes=(sizes,))


def recorded(made: nn.Module, x: Tensor) -> dict[str, tuple[Any, Any]]:
    """Return what each child takes and returns."""
    found: dict[str, tuple[Any, Any]] = {}
    for path, child in made.named_modules():

        def note(_: Any, args: Any, kwargs: Any, result: Any, path: str = path) -> None:
            assert not kwargs
            found.setdefault(path, (args, result))

        child.register_forward_hook(note, with_kwargs=True)
    made(x)
    return found


@pytest.mark.parametrize("shape", [(2, 3, 8), (5, 4, 8)])
def test_each_child_takes_tensors_alone(
    program: torch.export.ExportedProgram, shape: tuple[int, ...]
) -> None:
    made, x = unflatten(program, preserve="all"), torch.rand(shape)
    torch.testing.assert_close(made(x), program.module()(x))
    calls = recorded(made, x)
    assert set(calls) >= {"first", "second", "first.norm", "last", "last.0", "last.1"}
    for path, (args, result) in calls.items():
        assert all(isinstance(value, Tensor) for value in args), path
        torch.testing.assert_close(made.get_submodule(path)(*args), result, msg=path)


def test_order_is_that_of_first_use(program: torch.export.ExportedProgram) -> None:
    made = unflatten(program, preserve="all")
    calls = recorded(made, X)
    assert [tuple(value.shape) for value in calls["second"][0]] == [(2, 3, 8), (3, 1)]
    assert len(calls["first.norm"][0]) == 1


def test_table_says_that_signatures_are_not_eagers(program: torch.export.ExportedProgram) -> None:
    for row in unflatten(program, preserve="all").swappable():
        assert row.callable_alone
        assert not row.replaceable
        assert "export_preserving" in row.reason


def test_a_recorded_signature_stays_eagers() -> None:
    eager = Model().eval()
    names = ("first", "second")
    program = torch.export.export(eager, (X,), preserve_module_call_signature=names)
    made: Any = unflatten(program, preserve="all")
    assert [row.path for row in made.swappable() if row.replaceable] == list(names)
    made.second = eager.second
    torch.testing.assert_close(made(X), eager(X))
    torch.testing.assert_close(made.first.norm(X), eager.first.norm(X))


def test_another_value_is_refused(program: torch.export.ExportedProgram) -> None:
    given: Any = "some"
    with pytest.raises(UnsupportedProgramError, match="preserve='all' or None; found 'some'"):
        unflatten(program, preserve=given)


class Writes(nn.Module):
    """Returns its argument, and computes something else last."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = x.add_(1)
        self.count += 1
        return y


class HoldsWrites(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.writes = Writes()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.writes(x)
        return y / (y.abs() + 1)


class WritesAgain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.holds = HoldsWrites()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        z = self.holds(y)
        y.add_(1)
        return z, y


def test_what_a_flat_module_must_return_is_told() -> None:
    eager, x = WritesAgain(), torch.randn(2, 4)
    made: Any = unflatten(torch.export.export(eager, (x,)), preserve="all")
    (reason,) = (row.reason for row in made.swappable() if row.path == "holds.writes")
    assert "must return" in reason or "flat values" in reason
    torch.testing.assert_close(made(x), eager(x))
    made.holds.writes.register_forward_hook(lambda _, __, y: y * 2)
    with pytest.raises(UnflattenError, match="something else than the argument"):
        made(x)
