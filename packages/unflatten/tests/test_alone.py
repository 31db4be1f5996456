"""What ``swappable`` says of calling a module alone is what happens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from random_alone import FORMS, check_seed  # type: ignore[import-not-found]
from torch import Tensor, nn
from unflatten_comparison import assert_equal  # type: ignore[import-not-found]

from lowerdeck.unflatten import (
    InputConstraintError,
    UnflattenError,
    export_preserving,
    unflatten,
)
from lowerdeck_zoo.seeds import seeds

pytestmark = pytest.mark.filterwarnings("ignore:Decomposing this program lost:UserWarning")

# Those that found something, and some more; nox -s changes runs others each night.
FOUND = {
    5013: "decomposed preserving",
    5018: "decomposed preserving",
    5027: "strict preserving",
    5044: "plain",
    5093: "decomposed preserving",
    5129: "plain",
    50046: "preserving",
}


@pytest.mark.parametrize(("seed", "form"), FOUND.items())
def test_what_found_something_does_what_the_table_says(seed: int, form: str) -> None:
    check_seed(seed, cost=12, form=form)


@pytest.mark.parametrize("seed", seeds(2 * len(FORMS), first=6006))
def test_random_modules_alone_do_what_the_table_says(seed: int) -> None:
    check_seed(seed, cost=12)


def test_a_module_of_two_reasons_says_both() -> None:
    """It said one, was said to be called alone, and a hook on it was refused for the other."""
    check_seed(228, form="decomposed preserving")


class Scaled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.relu() + 1


class HandsState(nn.Module):
    """Calls its children with what it holds itself."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Scaled(), Scaled()
        self.weight = nn.Parameter(torch.randn(4))
        self.register_buffer("held", torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x * self.one(self.weight) + self.two(self.held)
        return result


def test_state_of_a_caller_is_an_argument() -> None:
    eager, x, y = HandsState(), torch.randn(3, 4), torch.randn(4)
    made = unflatten(torch.export.export(eager, (x,)), preserve="all")
    assert all(row.callable_alone for row in made.swappable())
    torch.testing.assert_close(made(x), eager(x))
    for path in ("one", "two"):
        torch.testing.assert_close(made.get_submodule(path)(y), Scaled()(y))


class Number(nn.Module):
    def forward(self, t: Tensor) -> float | int:
        return t.sum().item()


class Times(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, number: int) -> Tensor:
        result: Tensor = self.linear(x) * number
        return result


class HandsNumbers(nn.Module):
    """Calls its children with a number that another child computes."""

    def __init__(self) -> None:
        super().__init__()
        self.number, self.once, self.more = Number(), Times(), Times()

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        number = self.number(t)
        result: Tensor = self.more(self.once(x, number), number + 1)
        return result


def test_numbers_of_other_modules_are_arguments_and_results() -> None:
    eager, x, t = HandsNumbers(), torch.randn(3, 4), torch.tensor([1, 2])
    made: Any = unflatten(torch.export.export(eager, (x, t)), preserve="all")
    assert all(row.callable_alone for row in made.swappable())
    torch.testing.assert_close(made(x, t), eager(x, t))
    assert made.number(torch.tensor([3, 4])) == 7
    torch.testing.assert_close(made.once(x, 5), eager.once(x, 5))
    torch.testing.assert_close(made.more(x, 6), eager.more(x, 6))


class Step(nn.Module):
    def forward(self, x: Tensor, t: float) -> Tensor:
        return x * t


class Sampler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step = Step()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.step(self.step(self.step(x, 0.5), 0.25), 0.5)
        return result


def test_forms_that_arguments_tell_can_be_called_alone() -> None:
    eager, x = Sampler(), torch.randn(3, 4)
    made: Any = unflatten(export_preserving(eager, (x,)))
    assert [row.callable_alone for row in made.swappable()] == [True]
    for t in (0.5, 0.25):
        torch.testing.assert_close(made.step(x, t), eager.step(x, t))
        torch.testing.assert_close(made.step(x, t=t), eager.step(x, t))
    for wrong in ((x, 0.5, x), (x, 0.1)):
        with pytest.raises(InputConstraintError, match="fit none of them"):
            made.step(*wrong)
    for more in ({"other": x}, {"t": 0.5}):
        with pytest.raises(InputConstraintError, match="fit none of them"):
            made.step(x, 0.5, **more)


def test_forms_that_arguments_do_not_tell_are_named() -> None:
    made: Any = unflatten(torch.export.export(Sampler(), (torch.randn(3, 4),)), preserve="all")
    (row,) = made.swappable()
    assert not row.callable_alone
    assert "called in 2 forms, of which [0, 1] take such arguments" in row.reason
    with pytest.raises(InputConstraintError, match=r"fit the forms \[0, 1\]"):
        made.step(torch.randn(3, 4))


def test_a_module_that_the_program_calls_nowhere_says_so() -> None:
    made: Any = unflatten(torch.export.export(nn.Sequential(nn.Identity()), (torch.ones(1),)))
    (row,) = made.swappable()
    assert not row.callable_alone
    with pytest.raises(UnflattenError, match="the program calls nowhere"):
        made.get_submodule("0")(torch.ones(1))


class Keeps(nn.Module):
    """Hands a value to the next module by an attribute of its own."""

    kept: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.kept = x.sin()
        return x + 1


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Keeps(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.two(self.one(x))
        result: Tensor = y * self.one.kept
        del self.one.kept
        return result


def test_a_module_whose_values_others_read_is_not_called_alone() -> None:
    x = torch.randn(3, 4)
    made: Any = unflatten(export_preserving(Hidden(), (x,)))
    rows = {row.path: row for row in made.swappable()}
    assert (rows["one"].replaceable, rows["one"].callable_alone) == (False, False)
    torch.testing.assert_close(made(x), Hidden()(x))
    with pytest.raises(UnflattenError, match="computes 1 value that other modules read"):
        made.one(x)
    flat: Any = unflatten(torch.export.export(Hidden(), (x,)), preserve="all")
    assert all(row.callable_alone for row in flat.swappable())
    torch.testing.assert_close(flat.one(x), (x.sin(), x + 1))


class Divides(nn.Module):
    def forward(self, x: Tensor, by: float) -> Tensor:
        return x / by + by


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.divide = Divides()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.divide(self.divide(x, float("nan")), float("nan"))
        return result


def test_one_nan_is_as_another() -> None:
    x = torch.randn(3)
    made: Any = unflatten(export_preserving(Twice(), (x,)))
    assert not hasattr(made.divide, "call_modules")
    assert made.divide(x, float("nan")).isnan().all()


class TwoNames(nn.Module):
    """Calls one module by two names."""

    def __init__(self) -> None:
        super().__init__()
        self.one = self.two = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.two(self.one(x).sin())
        return made


def test_a_form_of_flat_values_and_one_of_a_signature_are_alike() -> None:
    x = torch.randn(2, 4)
    program = torch.export.export(TwoNames(), (x,), preserve_module_call_signature=("two",))
    made: Any = unflatten(program)
    assert len(made.one.call_modules()) == 2
    for row in made.swappable():
        try:
            made.get_submodule(row.path)(x)
        except UnflattenError:
            assert not row.callable_alone
        else:
            assert row.callable_alone


class OfSize(nn.Module):
    def forward(self, x: Tensor, size: tuple[int, ...]) -> Tensor:
        return x.reshape(size[::-1]) * size[0]


class AsksSize(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.child = OfSize()

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.child(x, x.shape)
        return made


def test_the_size_of_a_tensor_is_the_tuple_that_export_recorded() -> None:
    eager, x = AsksSize(), torch.randn(2, 3)
    made: Any = unflatten(export_preserving(eager, (x,)))
    for size in (x.shape, tuple(x.shape)):
        assert_equal(made.child(x, size), eager.child(x, size))
    with pytest.raises(UnflattenError, match="found Size of 3, expected tuple of 2"):
        made.child(x, torch.Size([2, 3, 1]))
