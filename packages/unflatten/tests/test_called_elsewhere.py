"""Modules whose calls a program has not: hooks on them and other modules there are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowerdeck.unflatten import UnflattenError, export_preserving, unflatten


class Calls(nn.Module):
    """Calls a module that another one holds."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.other = [other]

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.other[0](self.fc(x))
        return made


class Net(nn.Module):
    def __init__(self, *, is_called_too: bool) -> None:
        super().__init__()
        self.held = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.calls = Calls(self.held)
        self.is_called_too = is_called_too

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.calls(x)
        if self.is_called_too:
            made = made + self.held(x)
        return made


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(x) * 3


X = torch.randn(2, 4)
MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "elsewhere": (lambda: Net(is_called_too=False), "held"),
    "elsewhere, inside": (lambda: Net(is_called_too=False), "held.0"),
    "elsewhere too": (lambda: Net(is_called_too=True), "held"),
    "elsewhere too, inside": (lambda: Net(is_called_too=True), "held.1"),
}
EXPORTS: dict[str, Callable[..., Any]] = {
    "signatures": export_preserving,
    "plain": torch.export.export,
}
HOOKS = (
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
)


@pytest.mark.parametrize("export", EXPORTS)
@pytest.mark.parametrize("model", MODELS)
def test_what_would_have_no_effect_is_refused_and_told(model: str, export: str) -> None:
    make, path = MODELS[model]
    program = EXPORTS[export](make(), (X,))
    made: Any = unflatten(program)
    wanted = made(X)
    (row,) = (row for row in made.swappable() if row.path == path)
    assert not row.replaceable
    assert "no effect" in row.reason
    for register in HOOKS:
        handle = getattr(made.get_submodule(path), register)(lambda *_: None)
        with pytest.raises(UnflattenError, match=f"hook waits at '{path}', which"):
            made(X)
        handle.remove()
    torch.testing.assert_close(made(X), wanted)
    made.set_submodule(path, Around(made.get_submodule(path)))
    with pytest.raises(UnflattenError, match=r"stands for|is there as"):
        made(X)


@pytest.mark.parametrize("is_called_too", [False, True])
def test_what_calls_a_module_that_it_does_not_hold_can_be_replaced(is_called_too: bool) -> None:
    eager = Net(is_called_too=is_called_too)
    made = unflatten(export_preserving(eager, (X,)))
    row = next(row for row in made.swappable() if row.path == "calls")
    assert (row.replaceable, row.callable_alone) == (True, False)
    made.calls = eager.calls
    torch.testing.assert_close(made(X), eager(X))
    made.calls = eager.calls.fc
    assert not torch.equal(made(X), eager(X))
    made.calls = Calls(made.get_submodule("held") if is_called_too else eager.held)
    made.calls.fc = eager.calls.fc
    torch.testing.assert_close(made(X), eager(X))
