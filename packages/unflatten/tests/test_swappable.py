"""R2: the table of all modules, and the refusal to replace or hook those that it marks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from unflatten_zoo import CASES, Case  # type: ignore[import-not-found]
from unflatten_zoo.judges import Around, assert_same  # type: ignore[import-not-found]

from lowerdeck.unflatten import Swap, SwapTable, UnflattenError, export_preserving, unflatten
from lowerdeck_zoo import saved_and_loaded

X = torch.linspace(-1, 1, 12).view(3, 4)
BY_NAME = {str(case): case for case in CASES}


class Kinds(nn.Module):
    def forward(self, x: Tensor, kind: str) -> Tensor:
        return x + 1 if kind == "more" else x - 1


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.work = nn.LayerNorm(4), nn.Linear(4, 4)
        self.never = nn.Dropout()
        self.many = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: Tensor, *, scale: Tensor) -> dict[str, Tensor]:
        for layer in self.many:
            x = layer(x)
        return {"sum": x + self.work(self.norm(x)) * scale, "same": x}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.kinds = Block(), Kinds()

    def forward(self, x: Tensor) -> Tensor:
        kinds: Tensor = self.kinds(self.first(x, scale=x.mean())["sum"], "more")
        return kinds


@pytest.fixture(scope="module")
def program() -> torch.export.ExportedProgram:
    return export_preserving(Model().eval(), (X,))


def rows_of(table: SwapTable) -> dict[str, Swap]:
    return {row.path: row for row in table}


def test_the_table_has_every_module(program: torch.export.ExportedProgram) -> None:
    made = unflatten(program)
    table = made.swappable()
    rows = rows_of(table)
    assert [row.path for row in table] == [path for path, _ in made.named_modules() if path]
    assert [row.path for row in table if row.called and not row.replaceable] == ["kinds"]
    assert "'more'" in rows["kinds"].reason
    for path in ("first", "first.norm", "first.many.1"):
        assert rows[path] == Swap(path, replaceable=True, callable_alone=True)
    # What is never called, and what only holds others.
    assert not rows["first.never"].called
    assert rows["first.never"].reason
    assert not rows["first.many"].called
    assert not rows["first.many"].callable_alone
    assert isinstance(table[:2], tuple)
    assert table[0].path == "first"


def test_the_table_prints_one_line_for_each_module(program: torch.export.ExportedProgram) -> None:
    table = unflatten(program).swappable()
    lines = str(table).splitlines()
    assert len(lines) == len(table)
    assert lines[1].split() == ["first.norm", "replace", "call"]
    assert next(line for line in lines if line.startswith("kinds")).count("-") > 5


def test_a_saved_program_has_the_same_table(program: torch.export.ExportedProgram) -> None:
    made = unflatten(saved_and_loaded(program))
    assert str(made.swappable()) == str(unflatten(program).swappable())


def test_a_replaced_module_is_replaceable(program: torch.export.ExportedProgram) -> None:
    made = unflatten(program)
    made.set_submodule("first.norm", nn.LayerNorm(4))
    assert rows_of(made.swappable())["first.norm"].replaceable
    made.set_submodule("first.norm", nn.Identity())
    made(X)


def test_a_plain_export_marks_every_module_and_names_the_other_export() -> None:
    made = unflatten(torch.export.export(Model().eval(), (X,)))
    table = made.swappable()
    assert not any(row.replaceable for row in table)
    assert all("export_preserving" in row.reason for row in table if row.called)
    for change in CHANGES.values():
        for outer, name in (("", "first"), ("first", "norm")):
            with pytest.raises(UnflattenError, match=f"{name}'.*export_preserving"):
                change(made, outer, name)


def test_signatures_that_torch_recorded_are_signatures() -> None:
    eager = Model().eval()
    names = ("first", "first.norm")
    program = torch.export.export(eager, (X,), preserve_module_call_signature=names)
    made: Any = unflatten(program)
    assert {row.path for row in made.swappable() if row.replaceable} >= set(names)
    wanted = eager(X)
    for path in names:
        made = unflatten(program)
        made.set_submodule(path, eager.get_submodule(path))
        torch.testing.assert_close(made(X), wanted)
    torch.testing.assert_close(made.first(X, scale=X.mean()), eager.first(X, scale=X.mean()))


CHANGES: dict[str, Callable[[Any, str, str], object]] = {
    "set_submodule": lambda made, outer, name: made.set_submodule(
        f"{outer}.{name}".strip("."), nn.Tanh()
    ),
    "setattr": lambda made, outer, name: setattr(made.get_submodule(outer), name, nn.Tanh()),
    "add_module": lambda made, outer, name: made.get_submodule(outer).add_module(name, nn.Tanh()),
    "wrapped": lambda made, outer, name: setattr(
        made.get_submodule(outer), name, Around(made.get_submodule(f"{outer}.{name}".strip(".")))
    ),
    "forward hook": lambda made, outer, name: made.get_submodule(
        f"{outer}.{name}".strip(".")
    ).register_forward_hook(lambda *_: None),
    "forward pre-hook": lambda made, outer, name: made.get_submodule(
        f"{outer}.{name}".strip(".")
    ).register_forward_pre_hook(lambda *_: None),
}

# One case for each reason.
MARKED = {
    "texts": "kinds",
    "sized": "sized",
    "several structures": "child",
    "fills a cache": "first",
    "returns a container": "child",
    "calls itself": "inner",
    "borrows": "layer10.0",
    "branches": "inside",
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", MARKED)
def test_a_marked_module_is_neither_replaced_nor_hooked(name: str, change: str) -> None:
    case: Case = BY_NAME[name]
    made = case.unflattened("preserving")
    inputs = case.calls()[0]
    wanted = made(*inputs.args)
    row = rows_of(made.swappable())[MARKED[name]]
    assert not row.replaceable
    assert row.reason
    outer, _, last = MARKED[name].rpartition(".")
    with pytest.raises(UnflattenError, match=last):
        CHANGES[change](made, outer, last)
    assert_same(made(*inputs.args), wanted)


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)])
        self.named = nn.ModuleDict({"one": nn.Tanh(), "two": nn.ReLU()})

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, *self.named.values()):
            x = layer(x)
        return x


def test_lists_and_dicts_are_read_and_written_as_eagers() -> None:
    eager: Any = Listed()
    made: Any = unflatten(export_preserving(eager, (X,)))
    assert len(made.layers) == 3
    assert list(made.layers[1:]) == [made.layers[1], made.layers[2]]
    assert made.layers[-1] in made.layers
    assert ("one" in made.named, "three" in made.named) == (True, False)
    for model in (made, eager):
        torch.manual_seed(0)
        model.layers[0] = nn.Linear(4, 4)
        model.layers[-1] = nn.Sigmoid()
        model.named["one"] = nn.Identity()
    torch.testing.assert_close(made(X), eager(X))
    with pytest.raises(IndexError):
        made.layers[3] = nn.Tanh()


@pytest.mark.parametrize("path", ["first", "first.work"])
@pytest.mark.parametrize("how", ["deleted", "None"])
def test_a_child_that_is_gone_is_an_error(path: str, how: str) -> None:
    made: Any = unflatten(export_preserving(Model().eval(), (X,)))
    outer, _, last = path.rpartition(".")
    if how == "deleted":
        delattr(made.get_submodule(outer), last)
    else:
        setattr(made.get_submodule(outer), last, None)
    with pytest.raises((KeyError, AttributeError)):
        made(X)
    # What can be read of the rest still can.
    assert all(module.code for module in made.modules() if hasattr(module, "code"))
    made.swappable()
    made.state_dict()


class Named(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"value": x + 1}


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Named()

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)["value"] * 2


def test_a_result_without_a_key_is_no_child_that_is_gone() -> None:
    made: Any = unflatten(export_preserving(Reads(), (X,)))
    made.check_input_constraints = False
    made.inner.register_forward_hook(lambda *_: {})
    with pytest.raises(KeyError, match="value"):
        made(X)


def test_errors_of_the_model_and_of_hooks_stay_their_own() -> None:
    def fail(*_: Any) -> None:
        raise ValueError("on purpose")

    made: Any = unflatten(export_preserving(Listed(), (X,)))
    wanted = made(X)
    for register in ("register_forward_pre_hook", "register_forward_hook"):
        handle = getattr(made.layers[1], register)(fail)
        with pytest.raises(ValueError, match="on purpose"):
            made(X)
        handle.remove()
        torch.testing.assert_close(made(X), wanted)
    made.layers[1].register_forward_hook(lambda one: None)
    with pytest.raises(TypeError, match="positional"):
        made(X)
