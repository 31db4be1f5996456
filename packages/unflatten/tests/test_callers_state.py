"""Callers that read or write what a module holds say so, and say when another one lacks it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowerdeck.unflatten import UnflattenError, export_preserving, unflatten


class Wraps(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


class HandsOn(Wraps):
    """Has what the module that it wraps holds."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


class Two(nn.Module):
    def __init__(self, changed: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.child: Any = changed(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.child(x)
        return found


class Tied(Two):
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.relu(self.child(x)) @ self.child.weight
        return found


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.count: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return x + 1


class Writes(Two):
    def __init__(self) -> None:
        super().__init__(lambda _: Counts())

    def forward(self, x: Tensor) -> Tensor:
        self.child.count.add_(1)
        found: Tensor = self.child(x)
        return found


MODELS: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "tied": (lambda: Tied(lambda inner: inner), {"weight"}),
    "written": (Writes, {"count"}),
}


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("kind", MODELS)
def test_what_another_module_lacks_is_told(kind: str, depth: int) -> None:
    make, wanted = MODELS[kind]
    eager: Any = make().eval()
    x = torch.randn(3, 4)
    eager(x)
    path = "0.child" if depth else "child"
    whole = nn.Sequential(eager) if depth else eager
    program = export_preserving(whole, (x,))
    row = next(row for row in unflatten(program).swappable() if row.path == path)
    named = re.search(r"must hold (.*) too, which the code that calls it reads", row.reason)
    assert named is not None
    assert row.replaceable
    assert set(re.findall(r"'(\w+)'", named[1])) == wanted
    for other in (Wraps(eager.child), nn.Identity()):
        module = unflatten(program)
        module.set_submodule(path, other)
        with pytest.raises(UnflattenError, match=r"itself, but a \w+ is there as 'child'") as told:
            module(x)
        assert any(repr(f"child.{name}") in str(told.value) for name in wanted)
    module = unflatten(program)
    module.set_submodule(path, HandsOn(eager.child))
    torch.testing.assert_close(module(x), whole(x))


def test_modules_whose_state_only_they_read_have_nothing_to_say() -> None:
    program = export_preserving(Two(lambda inner: inner), (torch.randn(3, 4),))
    assert [row.reason for row in unflatten(program).swappable()] == [""]


class Bad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x.no_such_method()  # type: ignore[attr-defined]
        return found


def test_errors_of_other_modules_stay_their_own() -> None:
    x = torch.randn(3, 4)
    module: Any = unflatten(export_preserving(Tied(lambda inner: inner), (x,)))
    module.child = Bad()
    with pytest.raises(AttributeError, match="no_such_method"):
        module(x)
