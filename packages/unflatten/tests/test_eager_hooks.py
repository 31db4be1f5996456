"""Hooks that eager's modules had when they were exported leave with these modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from lowerdeck.unflatten import export_preserving, unflatten

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*_norm.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*was assigned during export:UserWarning"),
    pytest.mark.filterwarnings("ignore:While compiling, we found certain side:UserWarning"),
]


class Scales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor, times: Any = 1.0) -> Tensor:
        found: Tensor = x * self.weight * times
        return found


class Model(nn.Module):
    """Calls a module with a keyword, perhaps twice."""

    def __init__(self, hooked: Callable[[Any], object]) -> None:
        super().__init__()
        self.one: Any = Scales()
        self.two: Any = Scales()
        self.last = nn.Linear(4, 4)
        hooked(self.two)
        # Those of these hooks set an attribute of the module.
        self.twice = hooked not in {pruned, normed, spectral}

    def forward(self, x: Tensor) -> Tensor:
        y = self.two(self.one(x), times=x.sum())
        found: Tensor = self.last(self.two(y, times=y.sum()) if self.twice else y) + y
        return found


def one_tensor(module: nn.Module) -> None:
    module.register_forward_pre_hook(lambda _, args: args[0] * 2)


def arguments(module: nn.Module) -> None:
    module.register_forward_pre_hook(lambda _, args: (args[0] + 1, *args[1:]))


def keywords(module: nn.Module) -> None:
    def double(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args, {"times": kwargs.get("times", 2.0) * 3}

    module.register_forward_pre_hook(double, with_kwargs=True)


def in_order(module: nn.Module) -> None:
    keywords(module)
    arguments(module)
    module.register_forward_pre_hook(lambda _, args: (args[0] * 5,), prepend=True)


def on_both_sides(module: nn.Module) -> None:
    arguments(module)
    module.register_forward_hook(lambda _, args, result: result - args[0])


def looks(module: nn.Module) -> None:
    module.register_forward_pre_hook(lambda *_: None)


def on_parts(module: Any) -> None:
    """Hook a module that another one with hooks calls."""
    module.part = nn.Linear(4, 4)
    arguments(module.part)
    module.register_forward_pre_hook(lambda owner, args: (owner.part(args[0]),))


def pruned(module: nn.Module) -> None:
    prune.random_unstructured(module, "weight", 0.5)  # type: ignore[no-untyped-call]


def normed(module: nn.Module) -> None:
    nn.utils.weight_norm(module)


def spectral(module: Any) -> None:
    module.weight = nn.Parameter(torch.randn(1, 4))
    nn.utils.spectral_norm(module)
    module.eval()
    module(torch.ones(3, 4))


HOOKED = [
    *(one_tensor, arguments, keywords, in_order, on_both_sides, looks, on_parts),
    *(pruned, normed, spectral),
]


@pytest.fixture(params=HOOKED)
def eager(request: pytest.FixtureRequest) -> Model:
    torch.manual_seed(0)
    return Model(request.param)


@pytest.mark.parametrize("strict", [False, True])
def test_they_run_in_the_calls_of_their_modules(eager: Model, strict: bool) -> None:
    x = torch.randn(3, 4)
    hooks, wanted = len(eager.two._forward_pre_hooks), eager(x)
    program = export_preserving(eager, (x,), strict=strict)
    assert len(eager.two._forward_pre_hooks) == hooks
    assert type(eager.two) is Scales
    torch.testing.assert_close(eager(x), wanted)
    rows = {row.path: row for row in unflatten(program).swappable()}
    assert (rows["two"].replaceable, rows["two"].reason) == (True, "")
    torch.testing.assert_close(unflatten(program)(x), wanted)
    torch.testing.assert_close(
        unflatten(program).get_submodule("two")(x, times=x.sum()), eager.two(x, times=x.sum())
    )
    for other in (Scales(), eager.two):
        module, held = unflatten(program), eager.two
        module.set_submodule("two", other)
        eager.two = other
        torch.testing.assert_close(module(x), eager(x))
        eager.two = held
    module = unflatten(program)
    for two in (module.get_submodule("two"), eager.two):
        two.register_forward_hook(lambda *given: given[-1] * 2)
    torch.testing.assert_close(module(x), eager(x))


def test_a_forward_of_the_module_itself_stays() -> None:
    eager, x = Model(arguments), torch.randn(3, 4)
    plain = eager.two.forward
    eager.two.forward = lambda *args, **kwargs: plain(*args, **kwargs) + 1
    own = eager.two.forward
    wanted = eager(x)
    program = export_preserving(eager, (x,))
    assert eager.two.forward is own
    torch.testing.assert_close(unflatten(program)(x), wanted)
    torch.testing.assert_close(
        unflatten(program).get_submodule("two")(x, times=x.sum()), eager.two(x, times=x.sum())
    )
