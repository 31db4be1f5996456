"""A module put in another's place runs in the modes in which eager's would run there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import export

from lowerdeck.unflatten import UnflattenError, unflatten

X = torch.randn(2, 4)


def _half(**options: Any) -> torch.autocast:
    return torch.autocast("cpu", **{"dtype": torch.bfloat16, **options})


class Inner(nn.Module):
    """Two layers; how they are called is given."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.two = nn.Linear(4, 4)
        self.body = body

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


class Outer(Inner):
    def __init__(self, body: Callable[..., Any], inner: nn.Module) -> None:
        super().__init__(body)
        self.inner = inner


class Watches(nn.Module):
    """Calls eager's module and notes in which modes."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.precision: list[object] = []
        self.gradients: list[bool] = []

    def forward(self, x: Tensor) -> Any:
        on = torch.is_autocast_enabled("cpu")
        self.precision.append(torch.get_autocast_dtype("cpu") if on else None)
        self.gradients.append(torch.is_grad_enabled())
        return self.inner(x)


def _two(mode: Any, where: str) -> Callable[..., Any]:
    """Return a body that runs one layer, the other one or both in a mode."""

    def first(self: Any, x: Tensor) -> Any:
        with mode():
            x = self.one(x.float())
        return self.two(x.float())

    def last(self: Any, x: Tensor) -> Any:
        x = self.one(x.float())
        with mode():
            return self.two(x.float())

    def both(self: Any, x: Tensor) -> Any:
        with mode():
            return self.two(self.one(x.float()).float())

    return {"first": first, "last": last, "both": both}[where]


INNER = {
    f"{name} {where}": _two(mode, where)
    for name, mode in {
        "no_grad": torch.no_grad,
        "enable_grad": torch.enable_grad,
        "same autocast": _half,
        "float16": lambda: _half(dtype=torch.float16),
        "without cache": lambda: _half(cache_enabled=False),
    }.items()
    for where in ("first", "last", "both")
}


def _full_first(self: Any, x: Tensor) -> Any:
    with _half(enabled=False):
        x = self.one(x.float())
    return self.two(x.float())


def _full_both(self: Any, x: Tensor) -> Any:
    with _half(enabled=False):
        return self.two(self.one(x.float()).float())


INNER |= {
    "plain": lambda self, x: self.two(self.one(x.float()).float()),
    "autocast off first": _full_first,
    "autocast off both": _full_both,
}


def _alone(self: Any, x: Tensor) -> Any:
    with _half():
        x = self.inner(x)
    return self.two(x.float())


def _between(self: Any, x: Tensor) -> Any:
    with _half():
        x = self.inner(self.one(x).sin()).cos()
    return self.two(x.float())


def _before(self: Any, x: Tensor) -> Any:
    with _half():
        x = self.one(self.inner(x))
    return self.two(x.float())


def _full(self: Any, x: Tensor) -> Any:
    with _half():
        x = self.one(x)
        with _half(enabled=False):
            x = self.inner(x.float())
        x = self.one(x)
    return self.two(x.float())


def _without_gradients(self: Any, x: Tensor) -> Any:
    with torch.no_grad():
        x = self.inner(x)
    return self.two(x.float())


def _without_gradients_between(self: Any, x: Tensor) -> Any:
    with torch.no_grad():
        x = self.inner(self.one(x).sin()).cos()
    return self.two(x.float())


def _nested(self: Any, x: Tensor) -> Any:
    with torch.no_grad(), _half():
        x = self.inner(x)
    return self.two(x.float())


def _nested_other_way(self: Any, x: Tensor) -> Any:
    with _half(), torch.no_grad():
        x = self.inner(x)
    return self.two(x.float())


def _nowhere(self: Any, x: Tensor) -> Any:
    return self.two(self.inner(x).float())


OUTER = {
    body.__name__.strip("_"): body
    for body in (
        _alone,
        _between,
        _before,
        _full,
        _without_gradients,
        _without_gradients_between,
        _nested,
        _nested_other_way,
        _nowhere,
    )
}


@pytest.mark.parametrize("inner", INNER.values(), ids=INNER)
@pytest.mark.parametrize("outer", OUTER.values(), ids=OUTER)
def test_a_module_put_in_its_place_runs_in_eagers_modes(outer: Any, inner: Any) -> None:
    eager: Any = Outer(outer, Inner(inner))
    expected = eager(X)
    module: Any = unflatten(export(eager, (X,)))
    assert torch.equal(module(X), expected)
    seen, found = Watches(eager.inner), Watches(eager.inner)
    eager.inner, module.inner = seen, found
    if outer is _nested and inner in (INNER["no_grad last"], INNER["enable_grad last"]):
        with pytest.raises(UnflattenError, match="autocast"):
            module(X)
        return
    assert torch.equal(module(X), eager(X))
    assert found.precision == seen.precision
    if _tells_gradients(outer, inner):
        assert found.gradients == seen.gradients


def _tells_gradients(outer: Any, inner: Any) -> bool:
    """Return whether the program tells in which gradient mode eager calls the inner module.

    Export forgets a ``no_grad`` next to an ``autocast``, and that one was on around an
    ``enable_grad`` (README, "What a program does not tell").
    """
    name = next(name for name, body in INNER.items() if body is inner)
    return outer is not _nested and outer is not _nested_other_way and "enable" not in name
