"""A module that the program has no signature of, called alone with eager's arguments."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowerdeck.unflatten import (
    InputStructureError,
    UnflattenedModule,
    UnflattenError,
    export_preserving,
    unflatten,
)


class Rotary(nn.Module):
    """Is told by a text what to compute, which export does not record."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.ones(4))
        self.frequencies: Tensor

    def forward(self, x: Tensor, positions: Tensor, kind: str = "full") -> Tensor:
        return (positions[:, None] * self.frequencies + len(kind)).cos()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rotary = Rotary()
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.last(x * self.rotary(x, torch.arange(3.0), "full"))


class Twice(Model):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + self.rotary(x, torch.arange(3.0), kind="other")


X, WHERE = torch.randn(3, 4), torch.arange(3.0)

WRONG: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
    ((X, WHERE), {}, "called with 2 values"),
    ((X, WHERE, "full"), {}, "called with 3 values"),
    ((), {}, "called with 0 values"),
    ((WHERE,), {"kind": "full"}, "called with 1 value and 'kind' by name"),
    ((), {"positions": WHERE}, "'positions' by name"),
]


def saved(module: UnflattenedModule) -> UnflattenedModule:
    made: UnflattenedModule = pickle.loads(pickle.dumps(module))
    return made


@pytest.fixture(params=[None, "all"])
def module(request: pytest.FixtureRequest) -> UnflattenedModule:
    made = unflatten(export_preserving(Model(), (X,)), preserve=request.param)
    row = next(row for row in made.swappable() if row.path == "rotary")
    assert row.callable_alone
    assert not row.replaceable
    return made


@pytest.mark.parametrize(("args", "kwargs", "told"), WRONG)
def test_it_says_that_it_takes_flat_values(
    args: tuple[Any, ...], kwargs: dict[str, Any], told: str, module: UnflattenedModule
) -> None:
    """It was Python's own TypeError, of a forward that no model has."""
    for made in (module, copy.deepcopy(module), saved(module)):
        made.get_submodule("rotary").register_forward_hook(lambda *_: None)
        for _ in range(2):
            with pytest.raises(InputStructureError) as error:
                made.get_submodule("rotary")(*args, **kwargs)
            for part in (told, "Rotary", "flat values", "torch.float32", "Pass 1, by position"):
                assert part in str(error.value)


def test_what_it_takes_is_computed(module: UnflattenedModule) -> None:
    torch.testing.assert_close(module(X), module(X))
    torch.testing.assert_close(module.get_submodule("rotary")(WHERE), Rotary()(X, WHERE, "full"))
    compiled = torch.compile(module.requires_grad_(False), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(X), module(X))
    traced = torch.fx.symbolic_trace(module)
    torch.testing.assert_close(traced(X), module(X))


def test_what_a_hook_raises_is_its_own(module: UnflattenedModule) -> None:
    two: Any = lambda one, other: None  # noqa: E731

    rotary = module.get_submodule("rotary")
    rotary.register_forward_hook(two)
    with pytest.raises(TypeError, match="positional") as error:
        rotary(WHERE)
    assert not isinstance(error.value, InputStructureError)


@pytest.mark.parametrize(("args", "kwargs", "told"), WRONG)
def test_one_of_several_forms_says_so_too(
    args: tuple[Any, ...], kwargs: dict[str, Any], told: str
) -> None:
    rotary: Any = unflatten(export_preserving(Twice(), (X,))).get_submodule("rotary")
    with pytest.raises(UnflattenError):
        rotary(*args, **kwargs)
    for number, kind in enumerate(("full", "other")):
        form = rotary.call_modules()[number]
        torch.testing.assert_close(form(WHERE), Rotary()(X, WHERE, kind))
        with pytest.raises(InputStructureError, match=told):
            form(*args, **kwargs)
