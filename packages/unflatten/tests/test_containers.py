"""Lists and dicts of modules that the program calls one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowerdeck.unflatten import UnflattenError, export_preserving, unflatten


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)])
        self.named = nn.ModuleDict({"one": nn.Tanh(), "two": nn.ReLU()})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        for module in self.named.values():
            x = module(x)
        return x


X = torch.randn(3, 4)


@pytest.fixture
def made() -> Any:
    return unflatten(torch.export.export(Listed(), (X,)))


def test_lists_are_read_as_eagers(made: Any) -> None:
    layers = made.layers
    assert layers[1] in layers
    assert nn.ReLU() not in layers
    assert ("one" in made.named, "three" in made.named) == (True, False)
    assert list(layers[1:]) == [layers[1], layers[2]]
    assert next(iter(layers[::-1])) is layers[2]
    assert len(layers[:2]) == 2


def test_a_list_is_read_as_other_modules_are(made: Any) -> None:
    text = made.layers.print_readable(print_output=False)
    assert made.layers.code == "pass\n"
    assert text.startswith("class Container(torch.nn.Module)")
    assert made.layers[0].code.splitlines()[1].strip() in text


def test_what_a_list_calls_cannot_grow_or_shrink(made: Any) -> None:
    wanted, layer = made(X), nn.ReLU()
    changes: list[Callable[[], object]] = [
        lambda: made.layers.append(layer),
        lambda: made.layers.extend([layer]),
        lambda: made.layers.insert(0, layer),
        lambda: made.layers.pop(0),
        lambda: made.named.update({"three": layer}),
        lambda: made.layers.__delitem__(0),
        lambda: made.layers.__delitem__(slice(1, 2)),
        lambda: made.named.__delitem__("one"),
    ]
    for change in changes:
        with pytest.raises(UnflattenError, match="an Identity in its place to compute nothing"):
            change()
    torch.testing.assert_close(made(X), wanted)
    made.layers[1] = nn.Sequential(made.layers[1], nn.Tanh())
    made.named["one"] = nn.Identity()
    assert not torch.equal(made(X), wanted)


def test_a_child_of_such_a_name_is_found() -> None:
    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.append, self.pop = nn.Linear(4, 4), nn.ReLU()

    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Holds()

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.inner.pop(self.inner.append(x))
            return result

    made: Any = unflatten(torch.export.export(Calls(), (X,)))
    assert made.inner.append is made.inner[0]
    with pytest.raises(AttributeError, match="has no attribute 'other'"):
        _ = made.inner.other


class Shown(nn.Module):
    """Shows a plain attribute in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.config = "some"

    def __repr__(self) -> str:
        return f"Shown({self.config})"

    def forward(self, x: Tensor) -> Tensor:
        return x + 1


def test_restored_types_print_without_their_attributes() -> None:
    eager = nn.Sequential(Shown())
    program = torch.export.export(eager, (X,))
    assert "(0): Shown()" in repr(unflatten(program, restore_types=True))
    assert "(0): Shown(some)" in repr(unflatten(program, restore_types=eager))


class Step(nn.Module):
    def forward(self, x: torch.Tensor, k: float) -> torch.Tensor:
        return x * k


class Steps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step, self.held = Step(), nn.ModuleList([nn.ReLU()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.held[0](self.step(self.step(x, 2.0), 3.0))
        return made


def test_a_container_of_ours_in_the_place_of_forms_is_told() -> None:
    module: Any = unflatten(torch.export.export(Steps(), (X,)))
    module.step = module.held
    with pytest.raises(UnflattenError, match="calls nowhere"):
        module(X)


class Holds(nn.Module):
    """Calls what a list and a module hold."""

    def __init__(self) -> None:
        super().__init__()
        self.many = nn.ModuleList([nn.Tanh(), nn.ReLU()])
        self.pair = nn.Sequential(nn.Sigmoid(), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.pair[1](self.many[1](self.many[0](x)))
        return made


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ParameterList([nn.Parameter(torch.randn(4)) for _ in range(12)])
        self.named = nn.ParameterDict({"one": nn.Parameter(torch.randn(4))})

    def forward(self, x: Tensor) -> Any:
        for weight in reversed(list(self.each)):
            x = x * weight
        return x + self.named["one"]


@pytest.mark.parametrize("strict", [False, True])
def test_lists_of_parameters_are_read_and_written_as_eagers(strict: bool) -> None:
    eager, x = Weights(), torch.randn(3, 4)
    made: Any = unflatten(torch.export.export(eager, (x,), strict=strict))
    assert len(made.each) == 12
    for number, weight in enumerate(made.each):
        torch.testing.assert_close(weight, eager.each[number])
    assert made.each[-1] in made.each
    assert "one" in made.named
    torch.testing.assert_close(made.named["one"], eager.named["one"])
    for module in (made, eager):
        module.each[3] = nn.Parameter(torch.ones(4))
        module.named["one"] = nn.Parameter(torch.zeros(4))
    torch.testing.assert_close(made(x), eager(x))
    with pytest.raises(UnflattenError, match="'append' changes"):
        made.each.append(nn.Parameter(torch.ones(4)))


def test_a_layer_is_no_list_of_its_parameters() -> None:
    made: Any = unflatten(torch.export.export(nn.Sequential(nn.Linear(4, 4)), (X,)))
    with pytest.raises(IndexError):
        made.get_submodule("0")[0]


def test_a_list_with_one_module_twice_has_both() -> None:
    layer = nn.Linear(4, 4)
    made: Any = unflatten(torch.export.export(Twice(layer), (X,)))
    assert [*made.layers] == [made.layers[0]] * 2


class Twice(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer, layer])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("export", [torch.export.export, export_preserving])
def test_calls_of_what_a_list_holds_ask_no_module_for_a_name(
    export: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch looks a name up in three places, which costs as much as half an operator.
    eager, x = Holds(), torch.randn(3)
    made, wanted = unflatten(export(eager, (x,))), eager(x)
    asked: list[str] = []
    own = nn.Module.__getattr__

    def counting(self: nn.Module, name: str) -> Any:
        asked.append(name)
        return own(self, name)

    monkeypatch.setattr(nn.Module, "__getattr__", counting)
    result = made(x)
    assert not asked
    monkeypatch.undo()
    torch.testing.assert_close(result, wanted)
