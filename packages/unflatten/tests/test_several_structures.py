"""What is put where export cannot record the calls is refused, and the advice given works."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowerdeck.unflatten import UnflattenError, export_preserving, unflatten

X = torch.randn(2, 4)


class Step(nn.Module):
    """Takes a tensor or a dict of tensors, and more by name; a text says how it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.work = nn.Linear(4, 4)

    def forward(self, x: Any, y: Any = None, by: Any = None, kind: str = "plain") -> Tensor:
        if isinstance(x, dict):
            x = x["a"] + x["b"]
        made: Tensor = self.work(x) if kind == "plain" else self.work(x).tanh()
        made = made if y is None else made + y
        return made if by is None else made * by


class Model(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.step, self.way = Step(), way

    def forward(self, x: Tensor) -> Any:
        x = self.step(x)
        if self.way == "a dict":
            return self.step({"a": x, "b": x * 2})
        if self.way == "by name":
            return self.step(x, y=x * 2) + self.step(x, by=x)
        return self.step(x, kind="tanh")


class Logs(nn.Module):
    """Hands on whatever it is given."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs) * 2


class Adapts(nn.Module):
    """As a low-rank adapter: knows the parameters of what it is around."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.more = inner, nn.Linear(4, 4, bias=False)

    def forward(self, x: Any, y: Any = None, by: Any = None, kind: str = "plain") -> Any:
        added = self.more(x["a"] if isinstance(x, dict) else x)
        return self.inner(x, y, by=by, kind=kind) + added


WAYS = ("a dict", "by name", "a text")
PUT: dict[str, Callable[[nn.Module], nn.Module]] = {
    "logs": Logs,
    "adapts": Adapts,
    "twice": lambda inner: Logs(Logs(inner)),
    "another": lambda _: Step(),
}


@pytest.mark.parametrize(("put", "strict"), [*((put, False) for put in PUT), ("logs", True)])
@pytest.mark.parametrize("way", WAYS)
def test_the_advice_works_when_it_is_followed(way: str, put: str, strict: bool) -> None:
    eager = Model(way)
    made: Any = unflatten(export_preserving(eager, (X,), strict=strict))
    torch.testing.assert_close(made(X), eager(X))
    rows = {row.path: row for row in made.swappable()}
    advice = "Put the other module, or what is to be around this one, into the model, and export"
    assert not rows["step"].replaceable
    assert advice in rows["step"].reason
    assert rows["step.work"].replaceable
    made.step = PUT[put](made.step)
    with pytest.raises(UnflattenError, match=advice):
        made(X)
    changed = copy.deepcopy(eager)
    changed.step = PUT[put](changed.step)  # type: ignore[assignment]
    again: Any = unflatten(export_preserving(changed, (X,), strict=strict))
    torch.testing.assert_close(again(X), changed(X))
    # What is inside is called in the place where the advice put it, and can be changed there.
    path = next(row.path for row in again.swappable() if row.path.endswith("work"))
    for model in (again, changed):
        torch.manual_seed(0)
        model.set_submodule(path, nn.Linear(4, 4))
    torch.testing.assert_close(again(X), changed(X))


@pytest.mark.parametrize("way", WAYS)
def test_a_plain_export_takes_what_hands_on_and_tells_the_others(way: str) -> None:
    eager = Model(way)
    made: Any = unflatten(torch.export.export(eager, (X,)))
    made.step = Logs(made.step)
    changed = copy.deepcopy(eager)
    changed.step = Logs(changed.step)  # type: ignore[assignment]
    torch.testing.assert_close(made(X), changed(X))
    made.step = nn.Sequential(made.step)
    if way != "a text":
        with pytest.raises(UnflattenError, match=r"Its call gives flat values.*takes \(input\)"):
            made(X)
    with pytest.raises(UnflattenError, match="has no signature"):
        made.step = Step()


@pytest.mark.parametrize("way", WAYS)
def test_hooks_need_no_signature(way: str) -> None:
    eager = Model(way)
    made: Any = unflatten(export_preserving(eager, (X,)))
    for model in (eager, made):
        model.step.register_forward_hook(lambda _, args, result: result * 3)
    torch.testing.assert_close(made(X), eager(X))
