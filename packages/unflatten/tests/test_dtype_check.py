"""Moving a module to another type: right where the program holds the conversions, else said so."""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import export
from unflatten_comparison import FORMS, check, programs  # type: ignore[import-not-found]

from lowerdeck.unflatten import InputConstraintError, export_preserving, unflatten

if TYPE_CHECKING:

    class Model(nn.Module):
        """A module whose attributes may be anything."""

        def __getattr__(self, name: str) -> Any: ...

else:
    Model = nn.Module


class Norm(Model):
    """As language models do it: in single precision, whatever comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Any:
        given = x.dtype
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * y.to(given)


class Cast(Model):
    def forward(self, x: Tensor) -> Any:
        return x.float()


class Converts(Model):
    def forward(self, x: Tensor) -> Any:
        return x.to(torch.bfloat16).sum() + x.mean()


X = torch.randn(2, 4)


@pytest.mark.parametrize("form", FORMS)
def test_a_conversion_that_left_no_trace_is_missed_aloud(form: str) -> None:
    eager = nn.Sequential(nn.Linear(4, 4), Norm())
    program = programs(eager, (X,), forms=(form,))[form]
    module = unflatten(program)
    torch.testing.assert_close(module(X), eager(X))
    with pytest.warns(UserWarning, match=r"was torch.float32 .* found torch.float64"):
        module.double()(X.double())


def test_a_compiled_module_checks_nothing() -> None:
    eager = nn.Sequential(nn.Linear(4, 4), Norm())
    module = unflatten(export(eager, (X,)))
    torch._dynamo.reset()
    with warnings.catch_warnings():
        # torch's own deprecations while it compiles.
        warnings.simplefilter("ignore")
        compiled: Any = torch.compile(module, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(X), eager(X))
        again = unflatten(export(module, (X,), strict=True))
    torch.testing.assert_close(again(X), eager(X))


@pytest.mark.parametrize("form", FORMS)
def test_a_conversion_that_the_program_holds_is_no_obstacle(form: str) -> None:
    eager = nn.Sequential(nn.Linear(4, 4), Converts())
    module = unflatten(programs(eager, (X,), forms=(form,))[form])
    found = module.double()(X.double())
    torch.testing.assert_close(found, copy.deepcopy(eager).double()(X.double()))


@pytest.mark.parametrize("preserved", [(), ("1",)])
def test_modules_that_only_convert_keep_their_calls(preserved: tuple[str, ...]) -> None:
    eager = nn.Sequential(nn.Linear(4, 4), Cast(), nn.ReLU())
    check(eager, (X,), preserve_module_call_signature=preserved)


def test_autocast_around_the_module_computes() -> None:
    eager = nn.Sequential(nn.Linear(4, 4), Norm(), nn.Linear(4, 2))
    module = unflatten(export(eager, (X,)))
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.warns(UserWarning, match="bfloat16"):
        found = module(X)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(found, eager(X), atol=0.05, rtol=0.05)


class Inside(Model):
    """Uses autocast itself, and converts what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.fc(x).float()
            z = self.fc(y).sigmoid()
        return z.float() * 2


class ReadsAgain(Inside):
    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.fc(x)
            z = y.float()
        return z.float() + y * 3


@pytest.mark.parametrize("strict", [False, True])
def test_autocast_inside_the_model_is_no_other_type(strict: bool) -> None:
    # Strict export records the types that there are without autocast.
    eager = nn.Sequential(Inside(), nn.Linear(4, 2))
    module = unflatten(export(eager, (X,), strict=strict))
    torch.testing.assert_close(module(X), eager(X))


def test_a_value_that_strict_export_took_for_its_conversion_is_said() -> None:
    eager = ReadsAgain()
    torch.testing.assert_close(unflatten(export(eager, (X,)))(X), eager(X))
    module = unflatten(export(eager, (X,), strict=True))
    with pytest.warns(
        UserWarning, match=r"was torch.float32 .* found torch.bfloat16.*strict=False"
    ):
        found = module(X)
    torch.testing.assert_close(found, eager(X), atol=0.05, rtol=0.05)


class InAutocast(Inside):
    """Gives a norm, which asks for the type, what a layer returns under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Norm())

    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.layers(x)
        return y.float()


@pytest.mark.parametrize("preserving", [False, True])
def test_what_autocast_makes_is_never_of_a_larger_type(preserving: bool) -> None:
    """Autocast makes less of float32: given that where less was recorded, eager branches."""
    eager: nn.Module = InAutocast()
    module: Any = unflatten((export_preserving if preserving else export)(eager, (X,)))
    torch.testing.assert_close(module(X), eager(X))
    module.set_submodule("layers.0", nn.Identity())
    with pytest.raises(InputConstraintError, match="bfloat16"):
        module(X)
