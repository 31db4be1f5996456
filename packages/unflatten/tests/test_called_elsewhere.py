"""Modules whose calls a program has not: hooks on them and other modules there are refused."""

from __future__ import annotations

import io
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


class CallsItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, times: int = 2) -> Any:
        return self(self.linear(x), times - 1) if times else x * 2


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "elsewhere": (lambda: Net(is_called_too=False), "held"),
    "elsewhere, inside": (lambda: Net(is_called_too=False), "held.0"),
    "elsewhere too": (lambda: Net(is_called_too=True), "held"),
    "elsewhere too, inside": (lambda: Net(is_called_too=True), "held.1"),
    "by itself": (lambda: nn.Sequential(CallsItself()), "0"),
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


class Layered(nn.Module):
    """Calls what a child holds beside that child, or without ever calling it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.b = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4))
        self.many, self.one, self.way = nn.ModuleList([nn.Linear(4, 4)]), nn.Identity(), way
        self.never = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        b: Any = self.b
        if self.way == "inside":
            made: Tensor = b[1](self.many[0](b(x)))
        elif self.way == "deep inside":
            made = b[0][1](b[1](b(x)))
        elif self.way == "only inside":
            made = b[0][0](b[1](x))
        else:
            made = b[0](b[0][1](self.one(x)))
        return made


@pytest.mark.parametrize("restored", [False, True])
@pytest.mark.parametrize("export", EXPORTS)
@pytest.mark.parametrize("way", ["inside", "deep inside", "only inside", "other"])
def test_each_module_is_in_the_table_once(way: str, export: str, restored: bool) -> None:
    eager = Layered(way).eval()
    program = EXPORTS[export](eager, (X,))
    types: Any = eager if restored else False
    table = unflatten(program, restore_types=types).swappable()
    assert [row.path for row in table] == [path for path, _ in eager.named_modules() if path]
    for row in table:
        assert row.replaceable or row.reason
        made = unflatten(program, restore_types=types)
        if row.replaceable:
            made.set_submodule(row.path, eager.get_submodule(row.path))
            torch.testing.assert_close(made(X), eager(X))
        if row.callable_alone and row.called and export == "signatures":
            alone = unflatten(program, restore_types=types).get_submodule(row.path)
            torch.testing.assert_close(alone(X), eager.get_submodule(row.path)(X))
    if export == "plain":
        assert not any(row.replaceable for row in table)


@pytest.mark.parametrize("strict", [False, True])
def test_what_may_compute_nothing_is_refused_where_some_signatures_are_recorded(
    strict: bool,
) -> None:
    eager = nn.Sequential(nn.Linear(4, 4), nn.Identity()).eval()
    program = torch.export.export(
        eager, (X,), strict=strict, preserve_module_call_signature=("0",)
    )
    made = unflatten(program)
    assert [row.replaceable for row in made.swappable()] == [True, False]
    with pytest.raises(UnflattenError, match="computes nothing"):
        made.set_submodule("1", nn.Tanh())


@pytest.mark.parametrize("how", ["decomposed", "saved"])
def test_what_nobody_calls_is_known_in_programs_of_ours_however_they_are_kept(how: str) -> None:
    program = export_preserving(Layered("inside").eval(), (X,))
    if how == "decomposed":
        program = program.run_decompositions()
    else:
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        program = torch.export.load(file)
    made = unflatten(program)
    rows = {row.path: row for row in made.swappable()}
    assert (rows["never"].replaceable, rows["never"].called) == (True, False)
    wanted = made(X)
    made.never = nn.Linear(4, 4)
    torch.testing.assert_close(made(X), wanted)
