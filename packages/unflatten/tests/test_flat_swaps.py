"""What may take the place of a module of which the program has no signature."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from lowerdeck.unflatten import UnflattenError, export_preserving, unflatten

X = torch.randn(3, 4)


class Scale(nn.Module):
    """Has a parameter that callers give or leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, k: float = 1.0) -> torch.Tensor:
        made: torch.Tensor = x + self.a(x) * k
        return made


class Difference(nn.Module):
    """Reads its arguments in another order than it takes them."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return y.neg() + x


class Both(nn.Module):
    """Returns its results in another order than it computes them."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = x.sin()
        return x.cos(), first


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Scale(), Scale()])
        self.difference, self.both = Difference(), Both()
        self.layer, self.drop = nn.Linear(4, 4), nn.Dropout()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x, k=number + 2.0)
        one, two = self.both(self.drop(self.layer(x)))
        made: torch.Tensor = self.difference(one, two * 2)
        return made


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *values: torch.Tensor) -> Any:
        return self.inner(*values)


class Takes(nn.Module):
    """Takes one value and says itself what it gives its module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x, 3.0)


class Flat(nn.Module):
    """Takes the values of ``Difference`` in the order of their use."""

    def forward(self, *values: torch.Tensor) -> torch.Tensor:
        used_first, used_next = values
        return used_next - used_first


# Every module of the plain export is replaced by eager's own: it computes what eager does, or is
# refused; never anything else.
@pytest.mark.parametrize("preserve", [None, "all"])
@pytest.mark.parametrize("how", ["set", "in a list", "factory"])
def test_eager_modules_in_a_plain_export_are_right_or_refused(preserve: Any, how: str) -> None:
    eager = Model().eval()
    program = torch.export.export(eager, (X,))
    refused = {"blocks.0", "blocks.1", "difference", "both"}
    for path in (*refused, "layer", "drop", "blocks.1.a"):
        other = copy.deepcopy(eager.get_submodule(path))

        def put(path: str = path, other: nn.Module = other) -> Any:
            if how == "factory":
                return unflatten(
                    program,
                    preserve=preserve,
                    module_factory=lambda name, made: other if name == path else made,
                )
            made: Any = unflatten(program, preserve=preserve)
            if how == "in a list" and path.startswith("blocks.") and path in refused:
                made.blocks = copy.deepcopy(eager.blocks)
            else:
                made.set_submodule(path, other)
            return made

        if path in refused:
            with pytest.raises(UnflattenError, match="export_preserving"):
                put()
        else:
            torch.testing.assert_close(put()(X), eager(X))


def test_what_says_how_its_module_is_called_is_taken() -> None:
    eager = Model().eval()
    module: Any = unflatten(torch.export.export(eager, (X,)))
    module.blocks[1] = Takes(copy.deepcopy(eager.blocks[1]))
    torch.testing.assert_close(module(X), eager(X))
    module.difference = Flat()
    torch.testing.assert_close(module(X), eager(X))
    module = unflatten(torch.export.export(eager, (X,)))
    # What is put around a generated module knows how that is called.
    module.difference = nn.ModuleList([module.difference])[0]
    module.layer = nn.Sequential(module.layer)
    torch.testing.assert_close(module(X), eager(X))


# Eager's linear layer has one parameter, so that its caller gave no other.
def test_a_module_with_more_parameters_takes_the_place_of_one_with_one() -> None:
    module: Any = unflatten(torch.export.export(Model().eval(), (X,)))
    module.layer = Scale()
    module(X)


def _by_name(module: Any, new: nn.Module) -> None:
    module.add_module("difference", new)


def _registered(module: Any, new: nn.Module) -> None:
    module.register_module("difference", new)


def _after_deleting(module: Any, new: nn.Module) -> None:
    del module.difference
    module.difference = new


def _after_deleting_by_name(module: Any, new: nn.Module) -> None:
    del module.difference
    module.add_module("difference", new)


@pytest.mark.parametrize(
    "put", [_by_name, _registered, _after_deleting, _after_deleting_by_name, setattr]
)
def test_every_way_to_put_a_module_there_is_looked_at(put: Any) -> None:
    eager = Model().eval()
    program = torch.export.export(eager, (X,))
    made: Any = unflatten(program)
    put = (lambda one, new: setattr(one, "difference", new)) if put is setattr else put
    with pytest.raises(UnflattenError, match="order that may be another one"):
        put(made, eager.difference)
    made = unflatten(program)
    put(made, Around(made.difference))
    torch.testing.assert_close(made(X), eager(X))


def test_modules_of_programs_with_signatures_are_put_there_without_a_walk() -> None:
    walked: list[object] = []

    class Counts(nn.Module):
        def modules(self, remove_duplicate: bool = True) -> Iterator[nn.Module]:
            walked.append(self)
            return super().modules(remove_duplicate)

    made: Any = unflatten(export_preserving(Model(), (X,)))
    made.layer = Counts()
    assert not walked


class Alone(nn.Module):
    """Knows no more than its one argument."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x - y


class Held(nn.Module):
    """Calls a part of its children, by index and by name."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Difference(), nn.Linear(4, 4)])
        self.named = nn.ModuleDict({"one": Difference(), "two": nn.Linear(4, 4)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.parts[1](self.parts[0](x, x.sin()))
        made: torch.Tensor = self.named["two"](self.named["one"](x.cos(), x))
        return made


@pytest.mark.parametrize("how", ["plain", "restored", "as eager"])
def test_containers_look_at_what_is_put_in_them_however_they_are_made(how: str) -> None:
    eager = Held()
    program = torch.export.export(eager, (X,))
    ways: dict[str, bool | nn.Module] = {"plain": False, "restored": True, "as eager": eager}
    restored = ways[how]
    made: Any = unflatten(program, restore_types=restored)

    def put_list() -> None:
        made.parts = nn.ModuleList([Alone(), made.parts[1]])

    def put_dict() -> None:
        made.named = nn.ModuleDict({"one": Alone(), "two": made.named["two"]})

    for put in (
        put_list,
        put_dict,
        lambda: made.parts.__setitem__(0, Alone()),
        lambda: setattr(made.parts, "0", Alone()),
        lambda: made.named.__setitem__("one", Alone()),
        lambda: made.named.add_module("one", Alone()),
        lambda: made.parts.insert(0, Alone()),
        lambda: made.parts.pop(0),
        lambda: made.parts.append(Alone()),
        lambda: made.parts.__delitem__(0),
        lambda: made.named.update({"one": Alone()}),
        made.named.clear,
    ):
        with pytest.raises(UnflattenError, match=r"has no signature|changes which children"):
            put()
    # What was made so stands for itself when it is exported and restored again.
    again: Any = unflatten(torch.export.export(made, (X,)), restore_types=made)
    torch.testing.assert_close(again(X), eager(X))
    made.parts[1] = nn.Sequential(made.parts[1])
    for one in (made, copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        torch.testing.assert_close(one(X), eager(X))
        with pytest.raises(UnflattenError, match="has no signature"):
            one.parts[0] = Alone()
        assert len(one.parts[:1]) == len(list(one.parts)[:1]) == 1
        assert isinstance(one.parts, nn.ModuleList) == (how == "as eager")


def _undone(function: Any) -> Any:
    """Decorate as libraries do that hide what a forward takes."""

    def decorated(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    return decorated


class Named(nn.Module):
    """Reads its arguments in another order, and takes any by name, as blocks of models do."""

    def forward(self, x: torch.Tensor, y: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        made: torch.Tensor = y.neg() + x * kwargs.get("by", 1)
        return made


class Hidden(nn.Module):
    @_undone
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return y.neg() + x


class OneNamed(nn.Module):
    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        made: torch.Tensor = x * kwargs["by"]
        return made


class Any1(nn.Module):
    @_undone
    def forward(self, x: torch.Tensor, by: float = 1.0) -> torch.Tensor:
        return x * by


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.named, self.hidden, self.one, self.any = Named(), Hidden(), OneNamed(), Any1()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.any(self.one(self.hidden(x, self.named(x, x + 1)), by=2), 3.0)
        return made


@pytest.mark.parametrize("preserve", [None, "all"])
@pytest.mark.parametrize("path", ["named", "hidden", "one", "any"])
def test_eager_blocks_that_take_anything_are_refused_with_what_both_take(
    path: str, preserve: Any
) -> None:
    eager = Blocks()
    made: Any = unflatten(torch.export.export(eager, (X,)), preserve=preserve)
    with pytest.raises(UnflattenError) as caught:
        made.set_submodule(path, copy.deepcopy(eager.get_submodule(path)))
    told = str(caught.value)
    assert "a tensor of shape (3, 4) of torch.float32" in told
    assert f"The forward of a {type(eager.get_submodule(path)).__name__} takes (" in told
    assert "Export the model with export_preserving" in told
    torch.testing.assert_close(made(X), eager(X))
    made = unflatten(export_preserving(eager, (X,)))
    made.set_submodule(path, copy.deepcopy(eager.get_submodule(path)))
    torch.testing.assert_close(made(X), eager(X))


class Fails(nn.Module):
    """Takes anything, and does something else with it than is given."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] + kwargs["by"]


class Own(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("my own")


class Stops(Exception):  # noqa: N818
    pass


class Early(nn.Module):
    def forward(self, *values: torch.Tensor) -> Any:
        raise Stops("early")


@pytest.mark.parametrize("place", ["difference", "blocks.0", "blocks"])
def test_what_fails_with_flat_values_is_told_what_they_were(place: str) -> None:
    eager = Model().eval()
    made: Any = unflatten(torch.export.export(eager, (X,)))
    if place == "blocks":
        made.blocks = nn.ModuleList([Fails(), made.blocks[1]])
    else:
        made.set_submodule(place, Fails())
    for one in (made, copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        with pytest.raises(UnflattenError, match="and failed: KeyError: 'by'") as caught:
            one(X)
        assert isinstance(caught.value.__cause__, KeyError)
        assert "a tensor of shape (3, 4)" in str(caught.value)
        assert "takes (*args, **kwargs)" in str(caught.value)


def test_a_wrapper_that_takes_less_is_told_what_it_is_given() -> None:
    eager = Model().eval()
    made: Any = unflatten(torch.export.export(eager, (X,)))
    made.difference = nn.Sequential(made.difference)
    with pytest.raises(UnflattenError, match=r"takes \(input\)\. Export the model"):
        made(X)


def test_what_a_module_raises_that_says_what_it_takes_is_its_own() -> None:
    made: Any = unflatten(torch.export.export(Model().eval(), (X,)))
    made.layer = Own()
    with pytest.raises(RuntimeError, match=r"^my own$"):
        made(X)
    made.layer = Early()
    with pytest.raises(Stops, match=r"^early$"):
        made(X)


@pytest.mark.parametrize("first", ["flat", "wrapped", "deleted", "refused after deleting"])
def test_what_comes_next_is_looked_at_too(first: str) -> None:
    eager = Model().eval()
    made: Any = unflatten(torch.export.export(eager, (X,)))
    if first == "flat":
        made.difference = Flat()
    elif first == "wrapped":
        made.difference = Around(made.difference)
    else:
        del made.difference
    if first == "refused after deleting":
        with pytest.raises(UnflattenError, match="order that may be another one"):
            made.difference = eager.difference
    with pytest.raises(UnflattenError, match="order that may be another one"):
        made.difference = eager.difference
    row = (
        next(row for row in made.swappable() if row.path == "difference")
        if (first in {"flat", "wrapped"})
        else None
    )
    assert row is None or not row.replaceable
    made.difference = Flat()
    torch.testing.assert_close(made(X), eager(X))


def test_a_module_that_was_replaced_is_not_kept_alive() -> None:
    made: Any = unflatten(torch.export.export(Model().eval(), (X,)))
    layer = weakref.ref(made.layer)
    weight = weakref.ref(made.layer.weight)
    made.layer = nn.Linear(4, 4)
    gc.collect()
    assert layer() is None
    assert weight() is None
