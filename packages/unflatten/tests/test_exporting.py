"""Export with all signatures: each module can be called alone and replaced, or says why not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowerdeck.unflatten import (
    UnflattenError,
    UnsupportedProgramError,
    export_preserving,
    unflatten,
)


class Kinds(nn.Module):
    def forward(self, x: Tensor, kind: str) -> Tensor:
        return x + 1 if kind == "more" else x - 1


class Sized(nn.Module):
    def forward(self, x: Tensor, size: int) -> Tensor:
        return x.sum(1) + torch.arange(size)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.work = nn.Linear(4, 4)
        self.never = nn.Dropout()
        self.many = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: Tensor, *, scale: Tensor) -> dict[str, Tensor]:
        for layer in self.many:
            x = layer(x)
        return {"sum": x + self.work(self.norm(x)) * scale, "same": x}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.second = Block()
        self.kinds = Kinds()
        self.sized = Sized()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.first(x, scale=x.mean())["sum"]
        y = self.second(y, scale=y.mean())["sum"]
        return self.kinds(y, "more"), self.sized(y, y.shape[0])


def recorded(made: nn.Module, path: str) -> list[tuple[Any, Any, Any]]:
    """Return what a child takes and returns when the whole is called."""
    calls: list[tuple[Any, Any, Any]] = []
    made.get_submodule(path).register_forward_hook(
        lambda _, args, kwargs, result: calls.append((args, kwargs, result)), with_kwargs=True
    )
    made(X)
    return list(calls)


X = torch.linspace(-1, 1, 12).view(3, 4)


@pytest.fixture(scope="module")
def eager() -> Model:
    torch.manual_seed(0)
    return Model().eval()


@pytest.fixture(scope="module")
def program(eager: Model) -> torch.export.ExportedProgram:
    rows = torch.export.Dim("rows", min=2, max=9)
    return export_preserving(eager, (X,), dynamic_shapes=({0: rows},))


def test_table_says_what_each_module_allows(program: torch.export.ExportedProgram) -> None:
    table = unflatten(program).swappable()
    known = {row.path: row for row in table}
    assert [row.path for row in table if not row.replaceable] == ["kinds", "sized"]
    assert known["kinds"].reason == "takes the text 'more', which export cannot record"
    assert known["sized"].reason == "takes a number that varies, which export cannot record"
    assert known["first.many.1"].callable_alone
    assert "first.never" not in known
    assert "first.many" not in known
    assert str(table).count("replace  call") == len(table) - 2


def test_what_the_table_allows_is_so(eager: Model, program: torch.export.ExportedProgram) -> None:
    wanted = eager(X)
    for row in unflatten(program).swappable():
        if not row.replaceable:
            continue
        made = unflatten(program)
        for args, kwargs, result in recorded(made, row.path):
            alone = made.get_submodule(row.path)(*args, **kwargs)
            torch.testing.assert_close(alone, result, msg=row.path)
        made.set_submodule(row.path, eager.get_submodule(row.path))
        torch.testing.assert_close(made(X), wanted, msg=row.path)


def test_replaced_modules_are_replaceable(
    eager: Model, program: torch.export.ExportedProgram
) -> None:
    made = unflatten(program)
    made.set_submodule("first.norm", eager.first.norm)
    assert made.swappable()[1:3][0].path == "first.norm"
    assert all(row.replaceable for row in made.swappable() if row.path == "first.norm")


def test_plain_exports_tell_how_to_export(eager: Model) -> None:
    table = unflatten(torch.export.export(eager, (X,))).swappable()
    assert not any(row.replaceable for row in table)
    assert all("export_preserving" in row.reason for row in table)


def test_errors_of_the_model_stay_its_own() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.work = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            if self.work(x).sum() > 0:
                return x
            return x + 1

    with pytest.raises(Exception, match="data-dependent"):
        export_preserving(Fails(), (X,))


def test_two_ways_to_name_modules_are_refused(eager: Model) -> None:
    with pytest.raises(UnsupportedProgramError, match="leave it out"):
        export_preserving(eager, (X,), preserve_module_call_signature=("first",))


def test_what_is_not_recorded_cannot_be_replaced(
    eager: Model, program: torch.export.ExportedProgram
) -> None:
    for path in ("kinds", "sized"):
        made = unflatten(program)
        made.set_submodule(path, eager.get_submodule(path))
        with pytest.raises(UnflattenError, match=rf"stands for '{path}', which takes"):
            made(X)


class Guarded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.work = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.work(x)
        return torch.relu(self.norm(y))


def test_a_module_that_decomposing_dissolved_cannot_be_replaced() -> None:
    eager = Guarded().eval()
    program = export_preserving(eager, (X,)).run_decompositions()
    with pytest.warns(UserWarning, match="lost the arguments or results of work"):
        made = unflatten(program)
    torch.testing.assert_close(made(X), eager(X))
    rows = {row.path: row for row in made.swappable()}
    assert not rows["work"].replaceable
    assert "run_decompositions" in rows["work"].reason
    made.set_submodule("work", nn.Linear(4, 4))
    with pytest.raises(UnflattenError, match="'work', which is called nowhere"):
        made(X)


def test_a_module_that_computes_nothing_may_be_replaced() -> None:
    eager = nn.Sequential(nn.Identity(), nn.Linear(4, 4)).eval()
    for program in (export_preserving(eager, (X,)), torch.export.export(eager, (X,))):
        made = unflatten(program)
        made.set_submodule("0", nn.Identity())
        torch.testing.assert_close(made(X), eager(X))
