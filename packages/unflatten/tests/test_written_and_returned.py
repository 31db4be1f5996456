"""Modules that write an argument in place and return it: others may read either of the two."""

from __future__ import annotations

import copy
import io
import sys
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


def recorded_by_torch(eager: nn.Module, x: Tensor) -> Any:
    return torch.export.export(eager, (x,), preserve_module_call_signature=("1.act",))


# Torch's own export has one name for the argument and the result, whoever reads them.
@pytest.mark.parametrize("preserve", [None, "all"])
@pytest.mark.parametrize("export", [torch.export.export, recorded_by_torch])
@pytest.mark.parametrize("model", [*TOLD, *UNTOLD])
def test_other_modules_are_told_where_torch_exported(
    model: type[Model], export: Any, preserve: Any
) -> None:
    eager = nn.Sequential(nn.Tanh(), model())
    x = torch.randn(3, 4)
    program = export(eager, (x,)) if export is torch.export.export else export(eager, x)
    table = unflatten(program, preserve=preserve).swappable()
    if export is recorded_by_torch:
        row = next(row for row in table if row.path == "1.act")
        assert "must return as its result what it is given" in row.reason
    for other in (nn.ReLU(inplace=True), nn.ReLU6(inplace=True), nn.GELU()):
        for put in (other, nn.Sequential(other)):
            module, changed = unflatten(program, preserve=preserve), copy.deepcopy(eager)
            module.set_submodule("1.act", put)
            changed.set_submodule("1.act", put)
            if isinstance(other, nn.GELU):
                with pytest.raises(UnflattenError, match="Return that argument"):
                    module(x)
            else:
                torch.testing.assert_close(module(x), changed(x))
    module = unflatten(program, preserve=preserve)
    handle = module.get_submodule("1.act").register_forward_hook(lambda *_: None)
    torch.testing.assert_close(module(x), eager(x))
    handle.remove()
    module.get_submodule("1.act").register_forward_hook(lambda _, args, result: result * 2)
    with pytest.raises(UnflattenError, match="Return that argument"):
        module(x)


def test_a_call_around_the_write_is_told_too() -> None:
    eager, x = ReadsOutside(), torch.randn(3, 4)
    for path in ("act.0", "act.0.0"):
        module = unflatten(torch.export.export(eager, (x,)))
        torch.testing.assert_close(module(x), eager(x))
        module.get_submodule(path).register_forward_hook(lambda _, args, result: result * 2)
        with pytest.raises(UnflattenError, match="Return that argument"):
            module(x)


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


class WritesOften(nn.Module):
    """Writes its argument by itself, or by other modules."""

    def __init__(self, count: int, *, inside: bool) -> None:
        super().__init__()
        self.count, self.inside = count, inside
        self.acts = nn.ModuleList(nn.ReLU(inplace=True) for _ in range(0 if inside else count))

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        for index in range(self.count):
            x = x.add_(1) if self.inside else self.acts[index](x)
        return x


@pytest.mark.parametrize("inside", [False, True])
def test_twice_the_writes_cost_twice_the_steps(*, inside: bool) -> None:
    def steps(count: int) -> int:
        model = nn.Sequential(WritesOften(count, inside=inside), nn.Linear(4, 4))
        program = torch.export.export(model, (torch.ones(2, 4),))
        found = 0

        def note(frame: object, event: str, arg: object) -> None:
            nonlocal found
            found += event in {"call", "c_call"}

        sys.setprofile(note)
        try:
            unflatten(program)
        finally:
            sys.setprofile(None)
        return found

    steps(10)  # what is done once
    assert steps(400) < 2.2 * steps(200)
