"""Modules that write an argument in place and return it: others may read either of the two."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowerdeck.unflatten import UnflattenError, export_preserving, unflatten


class Model(nn.Module):
    def __init__(self, act: nn.Module | None = None) -> None:
        super().__init__()
        self.work = nn.Linear(4, 4)
        self.act = nn.ReLU(inplace=True) if act is None else act


class ReadsResultOnce(Model):
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.work(self.act(self.work(x)))
        return found


class ReadsResultTwice(Model):
    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.work(x))
        added: Tensor = self.work(y) + y
        return added


class WritesResult(Model):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.act(self.work(x))
        y += 1
        return y, self.work(y)


class ReadsBoth(Model):
    def forward(self, x: Tensor) -> Tensor:
        y = self.work(x)
        added: Tensor = self.work(self.act(y)) + y
        return added


class ReadsArgument(Model):
    def forward(self, x: Tensor) -> Tensor:
        y = self.work(x)
        self.act(y)
        found: Tensor = self.work(y)
        return found


class WritesArgument(Model):
    def forward(self, x: Tensor) -> Tensor:
        y = self.work(x)
        z: Tensor = self.act(y)
        y *= 2
        return z


class ReturnsArgument(Model):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.work(x)
        return y, self.act(y)


class ReadsOutside(nn.Module):
    """The argument of the inner call is the outer one's too, whose caller reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Sequential(nn.Sequential(nn.ReLU(inplace=True)), nn.Linear(4, 4))
        self.work = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.work(x)
        added: Tensor = self.act(y) + y
        return added


class Pairs(nn.Module):
    def forward(self, *, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        x.add_(1)
        return x.sum(0), {"same": x.relu_()}


class ReadsPair(Model):
    def __init__(self) -> None:
        super().__init__(Pairs())

    def forward(self, x: Tensor) -> Tensor:
        y = self.work(x)
        total, more = self.act(x=y)
        added: Tensor = self.work(more["same"]) * total + y
        return added


class OtherPairs(nn.Module):
    def forward(self, *, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return x.sum(0), {"same": x + 1}


TOLD = (ReadsResultOnce, ReadsResultTwice, WritesResult)
UNTOLD = (ReadsBoth, ReadsArgument, WritesArgument, ReturnsArgument)


def programs(eager: nn.Module, x: Tensor, *, strict: bool) -> Any:
    program = export_preserving(eager, (x,), strict=strict)
    yield program
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    yield torch.export.load(file)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("model", [*TOLD, *UNTOLD])
@pytest.mark.parametrize("depth", [0, 1])
def test_other_modules_compute_as_eagers_or_are_told(
    model: type[Model], depth: int, strict: bool
) -> None:
    eager: nn.Module = nn.Sequential(nn.Tanh(), model()) if depth else model()
    path, x = "1.act" if depth else "act", torch.randn(3, 4)
    for program in programs(eager, x, strict=strict):
        row = next(row for row in unflatten(program).swappable() if row.path == path)
        assert ("must return as its result what it is given" in row.reason) == (model in UNTOLD)
        others = (nn.ReLU(inplace=True), nn.ReLU6(inplace=True), nn.Identity(), nn.GELU())
        for other in (*others, nn.Sequential(nn.ReLU(inplace=True))):
            module, changed = unflatten(program), copy.deepcopy(eager)
            module.set_submodule(path, other)
            changed.set_submodule(path, other)
            if model in UNTOLD and isinstance(other, nn.GELU):
                with pytest.raises(UnflattenError, match="Return that argument"):
                    module(x)
            else:
                torch.testing.assert_close(module(x), changed(x))
        module, changed = unflatten(program), copy.deepcopy(eager)
        for one in (module, changed):
            one.get_submodule(path).register_forward_hook(lambda _, args, result: result * 2)
        if model in UNTOLD:
            with pytest.raises(UnflattenError, match="Return that argument"):
                module(x)
        else:
            torch.testing.assert_close(module(x), changed(x))


@pytest.mark.parametrize(
    ("model", "path", "other", "is_told"),
    [
        (ReadsOutside, "act.0", nn.GELU(), False),
        (ReadsOutside, "act.0.0", nn.GELU(), False),
        (ReadsOutside, "act.0", nn.Sequential(nn.ReLU(inplace=True)), True),
        (ReadsPair, "act", OtherPairs(), False),
        (ReadsPair, "act", Pairs(), True),
    ],
)
def test_arguments_are_found_through_calls_and_containers(
    model: type[nn.Module], path: str, other: nn.Module, is_told: bool
) -> None:
    eager, x = model(), torch.randn(3, 4)
    module, changed = unflatten(export_preserving(eager, (x,))), copy.deepcopy(eager)
    torch.testing.assert_close(module(x), eager(x))
    module.set_submodule(path, other)
    changed.set_submodule(path, other)
    if is_told:
        torch.testing.assert_close(module(x), changed(x))
        return
    with pytest.raises(UnflattenError, match="Return that argument"):
        module(x)
