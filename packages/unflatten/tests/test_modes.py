"""Modules run in the modes in which eager's run, and switch what eager's switch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export
from unflatten_zoo.models import modes  # type: ignore[import-not-found]

from lowerdeck.unflatten import export_preserving, unflatten

X = torch.linspace(-1, 1, 8).view(2, 4)


def half(**options: Any) -> torch.autocast:
    return torch.autocast("cpu", **{"dtype": torch.bfloat16, **options})


class Inner(nn.Module):
    """Two layers, of which the first, the second or both run in a mode."""

    def __init__(self, mode: Callable[[], Any] | None, where: str) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.mode, self.where = mode, where

    def forward(self, x: Tensor) -> Any:
        for layer, name in ((self.one, "first"), (self.two, "last")):
            if self.mode is not None and self.where in (name, "both"):
                with self.mode():
                    x = layer(x.float())
            else:
                x = layer(x.float())
        return x


class Outer(nn.Module):
    """Calls a module in the modes of its caller, alone or between two layers."""

    def __init__(self, outside: Callable[[], Any], inner: nn.Module, between: bool) -> None:
        super().__init__()
        self.one, self.two, self.inner = nn.Linear(4, 4), nn.Linear(4, 4), inner
        self.outside, self.between = outside, between

    def forward(self, x: Tensor) -> Any:
        with self.outside():
            x = self.inner(self.one(x).sin()).cos() if self.between else self.inner(x)
        return self.two(x.float())


class Watches(nn.Module):
    """Calls eager's module and notes in which modes."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.seen: list[tuple[object, bool]] = []

    def forward(self, x: Tensor) -> Any:
        on = torch.is_autocast_enabled("cpu")
        precision = torch.get_autocast_dtype("cpu") if on else None
        self.seen.append((precision, torch.is_grad_enabled()))
        return self.inner(x)


MODES: dict[str, Any] = {
    "no_grad": torch.no_grad,
    "same autocast": half,
    "float16": partial(half, dtype=torch.float16),
    "autocast off": partial(half, enabled=False),
}
INNER: dict[str, Any] = {
    "plain": partial(Inner, None, ""),
    **{
        f"{name} {where}": partial(Inner, mode, where)
        for name, mode in MODES.items()
        for where in ("first", "last", "both")
    },
}
OUTER: dict[str, Any] = {
    "autocast": half,
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
}


@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("inner", INNER)
def test_a_module_runs_in_the_modes_of_its_call(inner: str, outer: str, between: bool) -> None:
    eager: Any = Outer(OUTER[outer], INNER[inner](), between)
    expected = eager(X)
    module: Any = unflatten(export_preserving(eager, (X,)))
    assert torch.equal(module(X), expected)
    wanted, found = Watches(eager.inner), Watches(eager.inner)
    eager.inner, module.inner = wanted, found
    assert torch.equal(module(X), eager(X))
    assert [seen[0] for seen in found.seen] == [seen[0] for seen in wanted.seen]
    if outer != "enable_grad":
        assert found.seen == wanted.seen


def calls_of(module: Any) -> list[str]:
    return [node.target for node in module.graph.nodes if node.op == "call_module"]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("place", ["first", "between", "last"])
def test_a_call_stays_one_call_whatever_it_switches(place: str, strict: bool) -> None:
    inner = modes.SwitchesOn(place)
    eager = modes.WithoutGradients(inner, deep=True)
    module: Any = unflatten(export(eager, (X,), strict=strict))
    torch.testing.assert_close(module(X), eager(X))
    # Both calls run the same code.
    assert calls_of(module) == ["fc", "inner", "inner", "fc"]
    assert calls_of(module.inner) == ["fc", "inner", "inner", "fc"]
    module, eager = unflatten(export(modes.SplitByMode(), (X,), strict=strict)), None
    assert calls_of(module) == ["block", "block"]


class Divides(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() / x.shape[1]


class InMode(nn.Module):
    def __init__(self, inner: nn.Module, mode: Any) -> None:
        super().__init__()
        self.inner, self.mode = inner, mode

    def forward(self, x: Tensor) -> Any:
        with self.mode():
            y = self.inner(x)
        return y + x


@pytest.mark.parametrize("way", ["plain", "strict", "all", "decomposed", "preserving"])
@pytest.mark.parametrize("mode", [half, torch.no_grad])
def test_a_size_read_in_a_mode_may_be_read_after_it(mode: Any, way: str) -> None:
    inner = InMode(InMode(Divides(), torch.no_grad), mode)
    eager = nn.Sequential(nn.Sequential(nn.Tanh(), inner), InMode(Divides(), mode), Divides())
    x, varies = torch.randn(2, 5, 4), ({1: Dim.AUTO},)
    if way == "preserving":
        program = export_preserving(eager, (x,), dynamic_shapes=varies)
    else:
        program = export(eager, (x,), dynamic_shapes=varies, strict=way == "strict")
    if way == "decomposed":
        program = program.run_decompositions({})
    module: Any = unflatten(program, preserve="all" if way == "all" else None)
    for given in (x, torch.randn(2, 7, 4)):
        assert torch.equal(module(given), eager(given))


@pytest.mark.parametrize("strict", [False, True])
def test_gradients_stop_where_eager_stops_them(strict: bool) -> None:
    eager = modes.Between()
    module = unflatten(export(eager, (X,), strict=strict))
    expected = torch.autograd.grad(eager(X).sum(), tuple(eager.parameters()))
    found = torch.autograd.grad(module(X).sum(), tuple(module.parameters()))
    torch.testing.assert_close(found, expected)
