"""A call stays one call whatever modes it, and what calls it, switch on and off."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mode_models import (  # type: ignore[import-not-found]
    CallsWithoutGradients,
    SwitchesOn,
    SwitchesOnBetween,
    SwitchesOnLast,
    WithoutGradients,
)
from torch import nn
from torch.export import export
from unflatten_comparison import compare  # type: ignore[import-not-found]

from lowerdeck.unflatten import export_preserving, unflatten

X = torch.randn(2, 4)


def _gradients(module: nn.Module) -> dict[str, Any]:
    found = torch.autograd.grad(
        module(X).square().sum(), tuple(module.parameters()), allow_unused=True
    )
    names = [name for name, _ in module.named_parameters()]
    return {
        name: None if value is None or not value.count_nonzero() else value
        for name, value in zip(names, found, strict=True)
    }


def _calls(module: Any) -> list[str]:
    return [node.target for node in module.graph.nodes if node.op == "call_module"]


_INNER = [SwitchesOn, SwitchesOnLast, SwitchesOnBetween]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("inner", _INNER, ids=lambda cls: cls.__name__)
def test_a_module_that_switches_gradients_on_stays_one_call(inner: Any, strict: bool) -> None:
    eager = CallsWithoutGradients(inner())
    module = unflatten(export(eager, (X,), strict=strict))
    compare(eager, module, (X,))
    torch.testing.assert_close(_gradients(module), _gradients(eager))
    # Both calls run the same code.
    assert _calls(module) == ["fc", "inner", "inner", "fc"]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("inner", _INNER, ids=lambda cls: cls.__name__)
def test_modules_around_it_stay_one_call_too(inner: Any, strict: bool) -> None:
    eager = WithoutGradients(inner())
    module: Any = unflatten(export(eager, (X,), strict=strict))
    compare(eager, module, (X,))
    torch.testing.assert_close(_gradients(module), _gradients(eager))
    assert _calls(module) == ["fc", "outer", "fc"]
    assert _calls(module.outer) == ["fc", "inner", "inner", "fc"]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("inner", _INNER, ids=lambda cls: cls.__name__)
def test_values_stay_right_when_decomposing_lost_the_modes(inner: Any, strict: bool) -> None:
    eager = WithoutGradients(inner())
    program = export(eager, (X,), strict=strict).run_decompositions({})
    compare(eager, unflatten(program), (X,))


def test_a_module_that_switches_autocast_off_stays_one_call() -> None:
    class Precise(SwitchesOn):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> Any:
            y = self.fc(x)
            with torch.autocast("cpu", enabled=False):
                z = self.fc(y.float())
            return self.fc(z)

    class Autocasts(CallsWithoutGradients):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = self.inner(x.sigmoid()).tanh()
                y = self.inner(y)
            return self.fc(y.float())

    eager = Autocasts(Precise())
    module = unflatten(export(eager, (X,)))
    compare(eager, module, (X,))
    assert _calls(module) == ["inner", "inner", "fc"]


class DividesByLength(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.tanh() / x.shape[1]


class InMode(nn.Module):
    def __init__(self, inner: nn.Module, mode: Any, adds: bool) -> None:
        super().__init__()
        self.inner, self.mode, self.adds = inner, mode, adds

    def forward(self, x: torch.Tensor) -> Any:
        with self.mode():
            y = self.inner(x)
        return y + x if self.adds else y


class Longer(nn.Module):
    """Asks within the mode for a length that it makes there."""

    def __init__(self) -> None:
        super().__init__()
        self.divides = DividesByLength()

    def forward(self, x: torch.Tensor) -> Any:
        return self.divides(torch.cat([x, x.relu() / x.shape[1]], 1))


def _autocast() -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16)


_ASKING: dict[str, Any] = {
    "alone": lambda mode, adds: InMode(DividesByLength(), mode, adds),
    "in another mode": lambda mode, adds: InMode(
        InMode(DividesByLength(), torch.no_grad, adds), mode, adds
    ),
    "deep": lambda mode, adds: nn.Sequential(nn.Tanh(), InMode(DividesByLength(), mode, adds)),
    "twice": lambda mode, adds: nn.Sequential(
        *(InMode(DividesByLength(), mode, adds) for _ in range(2))
    ),
    "longer": lambda mode, _: InMode(Longer(), mode, adds=False),
}


@pytest.mark.parametrize("way", ["plain", "strict", "all", "decomposed", "preserved"])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("mode", [_autocast, torch.no_grad])
@pytest.mark.parametrize("asking", _ASKING)
def test_a_size_asked_in_a_mode_may_be_asked_after_it(
    asking: str, mode: Any, adds: bool, way: str
) -> None:
    eager = nn.Sequential(_ASKING[asking](mode, adds), DividesByLength())
    x = torch.randn(2, 5, 4)
    varies = ({1: torch.export.Dim.AUTO},)
    if way == "preserved":
        program = export_preserving(eager, (x,), dynamic_shapes=varies)
    else:
        program = export(eager, (x,), dynamic_shapes=varies, strict=way == "strict")
    if way == "decomposed":
        program = program.run_decompositions({})
    module: Any = unflatten(program, preserve="all" if way == "all" else None)
    for given in (x, torch.randn(2, 7, 4)):
        assert torch.equal(module(given), program.module()(given))
    assert not any("several parts" in row.reason for row in module.swappable())
