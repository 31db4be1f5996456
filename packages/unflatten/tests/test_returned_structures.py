"""A changed module that returns another structure than the recorded one, or another constant."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lowerdeck.unflatten import InputConstraintError, export_preserving, unflatten

X = torch.randn(2, 3)


class Levels(nn.Module):
    """Returns so many tensors, in a tuple, a list, a dict, or one of these in another."""

    def __init__(self, count: int, kind: str, constant: Any = 0.5) -> None:
        super().__init__()
        self.count, self.kind, self.constant = count, kind, constant

    def forward(self, x: torch.Tensor) -> Any:
        made = [x * (number + 1) for number in range(self.count)]
        if self.kind == "tuple":
            return tuple(made)
        if self.kind == "list":
            return made
        if self.kind == "dict":
            return {f"level {number}": each for number, each in enumerate(made)}
        if self.kind == "nested":
            return {"inner": (made, x)}
        return (*made, self.constant)


class Summed(nn.Module):
    """Goes through all that it is given, or takes parts by their keys."""

    def __init__(self, kind: str, how: str = "all") -> None:
        super().__init__()
        self.levels = Levels(2, kind)
        self.how = how

    def forward(self, x: torch.Tensor) -> Any:
        found = self.levels(x)
        if self.how == "first":
            return found[0] if isinstance(found, (tuple, list)) else found["level 0"]
        if self.levels.kind == "nested":
            found = found["inner"][0]
        if self.levels.kind == "constant":
            *found, scale = found
            return sum(found) * scale
        return sum(found.values() if isinstance(found, dict) else found)


def put(model: Any, levels: nn.Module, how: str) -> Any:
    """Return ``model`` with its levels changed to what ``levels`` returns."""
    if how == "swap":
        model.levels = levels
    else:
        model.levels.register_forward_hook(lambda module, args, result: levels(*args))
    return model


@pytest.mark.parametrize("how", ["swap", "hook"])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("kind", ["tuple", "list", "dict", "nested"])
def test_more_or_fewer_parts_than_the_code_reads_are_refused(
    kind: str, count: int, how: str
) -> None:
    program = export_preserving(Summed(kind), (X,))
    for made in (unflatten(program), pickle.loads(pickle.dumps(unflatten(program)))):
        put(made, Levels(count, kind), how)
        with pytest.raises(InputConstraintError, match=r"'levels'.* it was recorded with \["):
            made(X)
        made.check_input_constraints = False
        if count == 3:
            made(X)


@pytest.mark.parametrize("how", ["swap", "hook"])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("kind", ["tuple", "list", "dict"])
def test_parts_that_the_code_leaves_out_must_be_there(kind: str, count: int, how: str) -> None:
    """How many there are may have been asked: ``if len(found) > 1``."""
    eager: Any = Summed(kind, "first")
    made: Any = unflatten(export_preserving(eager, (X,)))
    for model in (eager, made):
        put(model, Levels(count, kind), how)
    if count == 2:
        torch.testing.assert_close(made(X), eager(X))
        return
    with pytest.raises(InputConstraintError, match=r"'levels'.* it was recorded with \["):
        made(X)
    made.check_input_constraints = False
    if count == 3:
        torch.testing.assert_close(made(X), eager(X))


@pytest.mark.parametrize("how", ["swap", "hook"])
@pytest.mark.parametrize("constant", [0.25, 1, None, True, "text", X])
def test_another_constant_is_refused(constant: Any, how: str) -> None:
    made: Any = unflatten(export_preserving(Summed("constant"), (X,)))
    put(made, Levels(2, "constant", constant), how)
    with pytest.raises(InputConstraintError, match=r"its result\[2\] is .* recorded as 0.5"):
        made(X)


class Counts(nn.Module):
    """Reads some of a list by numbers from its end, or with steps."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.levels = Levels(4, "list")
        self.read = read

    def forward(self, x: torch.Tensor) -> Any:
        return self.read(self.levels(x))


COUNTED: dict[str, Callable[[Any], Any]] = {
    "last": lambda found: found[-1] + 1,
    "but one": lambda found: found[-2] + 1,
    "popped": lambda found: found.pop() + 1,
    "rest": lambda found: sum(found[1:]),
    "steps": lambda found: sum(found[::2]),
    "two of the first": lambda found: sum(found[:2]),
}


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("name", COUNTED)
def test_parts_that_are_counted_from_the_last(name: str, count: int) -> None:
    eager: Any = Counts(COUNTED[name])
    made: Any = unflatten(export_preserving(eager, (X,)))
    for model in (eager, made):
        put(model, Levels(count, "list"), "hook")
    with pytest.raises(InputConstraintError, match=r"'levels'.* it was recorded with \["):
        made(X)


class Pair(nn.Module):
    """Returns two tensors, in a dict of that order, the other order, or the second as None."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: torch.Tensor) -> Any:
        one, two = x.sin(), x.cos()
        if self.how == "other order":
            return {"two": two, "one": one}
        return {"one": one, "two": None if self.how == "None" else two}


class Reads(nn.Module):
    """Goes through the values of a dict, takes one of them, or hands all out."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.pair = Pair("as recorded")
        self.how = how

    def forward(self, x: torch.Tensor) -> Any:
        found = self.pair(x)
        if self.how == "all":
            one, two = found.values()
            return one if two is None else one - two.exp()
        return found["one"] if self.how == "one" else found


@pytest.mark.parametrize("change", ["swap", "hook"])
@pytest.mark.parametrize("other", ["other order", "None"])
@pytest.mark.parametrize("how", ["all", "one", "hands out"])
def test_a_dict_in_another_order_and_no_tensor_for_an_operator_are_refused(
    how: str, other: str, change: str
) -> None:
    made: Any = unflatten(export_preserving(Reads(how), (X,)))
    if change == "swap":
        made.pair = Pair(other)
    else:
        made.pair.register_forward_hook(lambda module, args, result: Pair(other)(*args))
    with pytest.raises(InputConstraintError, match=r"'pair'.* it was recorded (with|as) "):
        made(X)


class Another(nn.Module):
    """Returns a pair as another kind of sequence."""

    def __init__(self, kind: Callable[[Any], Any]) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> Any:
        return self.kind((x.sin(), x.cos()))


class Asks(nn.Module):
    """Asks what kind it is."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = Another(tuple)

    def forward(self, x: torch.Tensor) -> Any:
        found = self.pair(x)
        return found[0] if isinstance(found, tuple) else found[0] * 2


@pytest.mark.parametrize("kind", [list, dict.fromkeys, lambda found: found[0]])
def test_another_kind_of_structure_is_refused(kind: Callable[[Any], Any]) -> None:
    made: Any = unflatten(export_preserving(Asks(), (X,)))
    made.pair = Another(kind)
    with pytest.raises(InputConstraintError, match=r"'pair'.* it was recorded as a tuple"):
        made(X)


def test_the_same_structure_and_constant_pass() -> None:
    for kind in ("tuple", "list", "dict", "nested", "constant"):
        eager = Summed(kind)
        made: Any = unflatten(export_preserving(eager, (X,)))
        made.levels = copy.deepcopy(eager.levels)
        torch.testing.assert_close(made(X), eager(X))


@pytest.mark.parametrize("other", [lambda x: 3, lambda x: "text", lambda x: (x, x)])
def test_what_is_no_tensor_is_refused_where_a_size_of_one_is_read(
    other: Callable[[Any], Any],
) -> None:
    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            quotient: torch.Tensor = x.sum() / self.inner(x).shape[1]
            return quotient

    made: Any = unflatten(export_preserving(Sized(), (X,)))
    made.inner.register_forward_hook(lambda module, args, result: other(result))
    with pytest.raises(InputConstraintError, match="recorded with a tensor of shape"):
        made(X)
