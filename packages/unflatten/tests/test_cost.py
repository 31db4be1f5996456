"""Nothing grows with the square of calls, tensors or modules: steps are counted, not time."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export

import lowerdeck.unflatten
from lowerdeck.unflatten import export_preserving, unflatten

X = torch.randn(4)
FOLDER = lowerdeck.unflatten.__path__[0]
PACKAGE = lowerdeck.unflatten.__name__


def steps(run: Callable[[], object]) -> int:
    """Return how often code of ours is entered, generators each time they go on.

    Methods that dataclasses write count too: their hash is where many compare with many.
    """
    count = 0

    def note(frame: Any, event: str, _: object) -> None:
        nonlocal count
        if event == "call":
            is_written = frame.f_globals.get("__name__", "").startswith(PACKAGE)
            count += is_written or frame.f_code.co_filename.startswith(FOLDER)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


class Constant(nn.Module):
    """Computes the same whatever number it is given, or for each another thing."""

    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.reads = reads

    def forward(self, x: Tensor, number: int) -> Tensor:
        return x * (number + 2 if self.reads else 2)


class Calls(nn.Module):
    def __init__(self, count: int, *, reads: bool = False) -> None:
        super().__init__()
        self.child, self.count = Constant(reads=reads), count

    def forward(self, x: Tensor) -> Tensor:
        for number in range(self.count):
            x = self.child(x, number)
        return x


class Rows(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x + y).view(-1, x.shape[1] * 4).sum() / x.shape[0]


class Sizes(nn.Module):
    """Children that read sizes, which export asks the whole's argument for, once."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.many = nn.ModuleList(Rows() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for each in self.many:
            x = x + each(x[:, 1:] * 2, x[:, 1:]).tanh()
        return x


class OnePlus(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


def acts(count: int) -> list[nn.Module]:
    """Return modules that write their argument."""
    return [nn.ReLU(inplace=True) for _ in range(count)]


class Regions(nn.Module):
    """Calls modules in regions without gradients."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.many = nn.ModuleList(nn.Linear(4, 4) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for each in self.many:
            with torch.no_grad():
                y = each(x)
            x = x + y
        return x


def layers(count: int) -> nn.Sequential:
    """Return blocks of two layers each, of which no two share state."""
    return nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(count)])


def identities(count: int) -> nn.Sequential:
    """Return blocks that begin with a module that computes nothing."""
    return nn.Sequential(*[nn.Sequential(nn.Identity(), nn.Tanh()) for _ in range(count)])


SIZES = ({0: Dim("b"), 1: Dim("t", min=4)},)
Made = Callable[[], object]


def built(make: Callable[[int], nn.Module], record: Any = export_preserving) -> Any:
    """Return what builds a module of a count, given the count."""

    def of_count(count: int) -> Made:
        program = record(make(count), (X,))
        return lambda: unflatten(program)

    return of_count


def sizes(record: Any) -> Callable[[int], Made]:
    def of_count(count: int) -> Made:
        program = record(Sizes(count), (torch.randn(3, 5, 4),), dynamic_shapes=SIZES)
        return lambda: unflatten(program, preserve="all")

    return of_count


def first_call(count: int) -> Made:
    made = unflatten(export_preserving(Calls(count), (X,)))
    return lambda: made(X)


def table(count: int) -> Made:
    return unflatten(export_preserving(Calls(count, reads=True), (X,))).swappable


def change(count: int) -> Made:
    made = unflatten(export_preserving(layers(count), (X,)))

    def run() -> None:
        for number in range(count):
            made.set_submodule(f"{number}.1", nn.ReLU())
        made(X)

    return run


CASES: dict[str, Callable[[int], Made]] = {
    "layers": built(layers, export),
    "layers with signatures": built(layers),
    "calls of one code": built(Calls),
    "specializations": built(lambda count: Calls(count, reads=True)),
    "identities": built(identities),
    "sizes with signatures": sizes(export_preserving),
    "sizes": sizes(export),
    "writes": built(lambda count: nn.Sequential(OnePlus(), *acts(count))),
    "regions": built(Regions),
    "first call": first_call,
    "table": table,
    "changes": change,
}


@pytest.mark.parametrize("name", CASES)
def test_twice_as_many_take_twice_the_steps(name: str) -> None:
    # Torch's own export of these takes a tenth of a second for each.
    count = 20 if name.startswith(("sizes", "regions")) else 40
    small, large = (steps(CASES[name](number)) for number in (count, 2 * count))
    assert large < 2.1 * small, (small, large)


def test_a_call_costs_a_few_steps_for_each_child() -> None:
    """Calls of unchanged children from unchanged parents are not checked: a comparison each."""
    counts = []
    for count in (10, 20):
        made = unflatten(export_preserving(layers(count), (X,)))
        made(X)
        counts.append(steps(lambda made=made: made(X)))  # type: ignore[misc]
    # Each of the ten further blocks is a generated function that calls two.
    assert counts[1] - counts[0] <= 10 * 3 * 3


@pytest.mark.parametrize("is_on", [True, False])
def test_the_collector_is_on_or_off_as_before(is_on: bool) -> None:
    program = export(nn.ReLU(), (X,))
    if not is_on:
        gc.disable()
    try:
        unflatten(program)
        assert gc.isenabled() is is_on
    finally:
        gc.enable()
