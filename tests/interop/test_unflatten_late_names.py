"""Modules of decomposed programs changed where decomposing named a value that came later."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowerdeck.decompose import decompose
from lowerdeck.unflatten import UnflattenError, export_preserving, unflatten


class Adds(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1)


class Doubles(nn.Module):
    def forward(self, x: Tensor) -> None:
        x.mul_(2)


class Halves(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x.chunk(2, -1)


class Cache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(4, 4))

    def forward(self, x: Tensor) -> Any:
        self.kept[:2].copy_(x)
        return self.kept


class Model(nn.Module):
    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.work = nn.Linear(4, 4)
        self.child = child
        self.other = nn.Linear(4, 4)


class ReadsIdentityLater(Model):
    """In eager, the result of dropout is its argument, which the child then writes."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__(child)
        self.dropout, self.same = nn.Dropout(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.work(x)
        z = self.child(self.same(self.dropout(y)))
        read: Tensor = self.other(z) + y
        return read


class ReadsBeforeWriting(Model):
    """Dropout in place writes nothing here, and has no value of its own in the program."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__(child)
        self.dropout = nn.Dropout(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.work(x)
        z = self.other(self.dropout(y))
        self.child(y)
        read: Tensor = z + y
        return read


class ReadsViewLater(Model):
    def forward(self, x: Tensor) -> Tensor:
        y = self.work(x)
        view = y[:, :2]
        read: Tensor = self.other(self.child(y)) * view.mean()
        return read


class WritesPart(Model):
    def forward(self, x: Tensor) -> Tensor:
        y = self.work(x)
        one, two = self.child(y)
        one.add_(two)
        read: Tensor = self.other(y)
        return read


class ReadsCache(Model):
    def forward(self, x: Tensor) -> Tensor:
        read: Tensor = self.other(self.child(self.work(x))).sum(0) + x
        return read


MODELS: list[tuple[type[Model], type[nn.Module]]] = [
    (ReadsIdentityLater, Adds),
    (ReadsBeforeWriting, Adds),
    (ReadsBeforeWriting, Doubles),
    (ReadsViewLater, Adds),
    (WritesPart, Halves),
    (ReadsCache, Cache),
]


def halved(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(halved, value))
    return value / 2 if isinstance(value, Tensor) else value


def hook(module: nn.Module) -> None:
    module.register_forward_hook(lambda _, args, result: halved(result))


def pre_hook(module: nn.Module) -> None:
    module.register_forward_pre_hook(lambda _, args: halved(args))


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:Decomposing this program lost")
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("change", [hook, pre_hook])
@pytest.mark.parametrize(("model", "child"), MODELS)
def test_changes_are_eagers_or_refused(
    model: type[Model], child: type[nn.Module], change: Callable[[nn.Module], None], strict: bool
) -> None:
    eager = model(child()).eval()
    x = torch.randn(2, 4)
    program = decompose(export_preserving(eager, (x,), strict=strict))
    made = unflatten(program)
    torch.testing.assert_close(copy.deepcopy(made)(x), copy.deepcopy(eager)(x))
    rows = {row.path: row.replaceable for row in made.swappable()}
    assert (rows["child"], rows["work"], rows["other"]) == (False, True, True)
    refused = []
    for path, _ in eager.named_children():
        changed, subject = copy.deepcopy(eager), copy.deepcopy(made)
        change(changed.get_submodule(path))
        change(subject.get_submodule(path))
        try:
            found = subject(x)
        except UnflattenError as error:
            refused.append(str(error))
            continue
        torch.testing.assert_close(found, changed(x), msg=path)
    assert len(refused) < 4
    for path in ("work", "other"):
        made.set_submodule(path, eager.get_submodule(path))
    torch.testing.assert_close(made(x), eager(x))


class CalledInRegion(Model):
    def forward(self, x: Tensor) -> Tensor:
        y = self.child(self.work(x))
        with torch.no_grad():
            z = self.child(y).sigmoid()
        return y * z


@pytest.mark.filterwarnings("ignore:Decomposing this program lost")
@pytest.mark.parametrize("strict", [False, True])
def test_a_call_that_decomposing_gave_away_is_told(strict: bool) -> None:
    """It stayed in the caller with its weights: what was put there was called once, not twice."""
    eager, x = CalledInRegion(nn.LayerNorm(4)), torch.randn(2, 4)
    made = unflatten(decompose(export_preserving(eager, (x,), strict=strict)))
    torch.testing.assert_close(made(x), eager(x))
    assert "child" in [row.path for row in made.swappable() if row.reason]
    hook(made.get_submodule("child"))
    with pytest.raises(UnflattenError, match="decomposing gave to its caller"):
        made(x)


class WrittenLater(Model):
    def __init__(self, child: nn.Module, what: str) -> None:
        super().__init__(child)
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        y = self.work(x)
        z = self.child(y)
        (y if self.what == "argument" else z).add_(1)
        return self.other(z) + (0 if self.what == "unread" else y)


@torch.no_grad()
@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize("what", ["argument", "result", "unread"])
def test_another_module_may_return_its_argument_or_is_told(what: str, decomposed: bool) -> None:
    """A decomposed program has no write in place, which the argument would show in eager."""
    eager, x = WrittenLater(nn.GELU(), what), torch.randn(2, 4)
    program = export_preserving(eager, (x,))
    made: Any = unflatten(decompose(program) if decomposed else program)
    for other in (nn.Tanh(), nn.Identity(), nn.ReLU(inplace=True)):
        eager.child = made.child = other
        if decomposed and what != "unread" and not isinstance(other, nn.Tanh):
            with pytest.raises(UnflattenError, match="shares memory with an argument"):
                made(x)
        else:
            torch.testing.assert_close(made(x), eager(x))
