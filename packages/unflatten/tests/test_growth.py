"""Nothing grows with the square of calls, tensors or forms: steps are counted, not time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowerdeck.unflatten
from lowerdeck.unflatten import export_preserving, same_results, unflatten

X = torch.randn(4)
PACKAGE = lowerdeck.unflatten.__name__
FOLDER = lowerdeck.unflatten.__path__[0]


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


class Texts(nn.Module):
    def forward(self, x: Tensor, kind: str) -> Tensor:
        return x * len(kind)


class CallsTexts(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.many = nn.ModuleList(Texts() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for each in self.many:
            x = each(x, "text")
        return x


def _first_call(count: int) -> Callable[[], object]:
    made = unflatten(export_preserving(Calls(count), (X,)))
    return lambda: made(X)


def _table(count: int) -> Callable[[], object]:
    return unflatten(export_preserving(Calls(count, reads=True), (X,))).swappable


def _plain_table(count: int) -> Callable[[], object]:
    return unflatten(torch.export.export(Calls(count, reads=True), (X,))).swappable


def _refused(count: int) -> Callable[[], object]:
    program = export_preserving(CallsTexts(count), (X,))
    return lambda: unflatten(program)


def _without_calls(count: int) -> Callable[[], object]:
    eager = nn.Sequential(*[nn.Sequential(nn.Identity(), nn.Tanh()) for _ in range(count)])
    names = tuple(path for path, _ in eager.named_modules() if path)
    program = torch.export.export(eager, (X,), preserve_module_call_signature=names)
    return lambda: unflatten(program)


def _given_tensors(count: int) -> Callable[[], object]:
    hook = same_results._aliasing_arguments("child")
    return lambda: hook(nn.Tanh(), ([torch.zeros(1) for _ in range(8 * count)],), {})


def _returned_tensors(count: int) -> Callable[[], object]:
    hook = same_results._aliasing("child", twice="child")
    given, result = ([torch.zeros(1) for _ in range(8 * count)] for _ in range(2))
    return lambda: hook(nn.Tanh(), (given,), {}, result)


class Halves(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5


class Prefixes(nn.Module):
    """One module with the same code for arguments that each have another size."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.child, self.count = Halves(), count

    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.child(x[:size]) for size in range(1, self.count + 1)]


def _prefixes(count: int) -> Callable[[], object]:
    program = torch.export.export(Prefixes(count), (torch.randn(count),))
    return lambda: unflatten(program)


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


def _sizes(count: int, *, preserving: bool) -> Callable[[], object]:
    export = export_preserving if preserving else torch.export.export
    sizes = ({0: torch.export.Dim("b"), 1: torch.export.Dim("t", min=4)},)
    program = export(Sizes(count), (torch.randn(3, 5, 4),), dynamic_shapes=sizes)
    return lambda: unflatten(program, preserve="all")


def _own_sizes(count: int) -> Callable[[], object]:
    return _sizes(count, preserving=True)


def _plain_sizes(count: int) -> Callable[[], object]:
    return _sizes(count, preserving=False)


class Watched(nn.Module):
    """The code around its children reads sizes of what they return."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.many = nn.ModuleList(nn.Linear(4, 4) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for each in self.many:
            y = each(x[:, 1:])
            x = x + y.sum(1, keepdim=True) / y.shape[1]
        return x


def _watched(count: int) -> Callable[[], object]:
    sizes = ({0: torch.export.Dim("b"), 1: torch.export.Dim("t", min=4)},)
    program = export_preserving(Watched(count), (torch.randn(3, 5, 4),), dynamic_shapes=sizes)
    made = unflatten(program)
    return lambda: made.set_submodule("many.0", nn.Linear(4, 4))


class WatchedFixed(Watched):
    """Each number that is computed of a size is another one, as is what no size explains."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        for number, each in enumerate(self.many):
            y = each(x)
            x = x + y.sum(1, keepdim=True) * (number + 1 / y.shape[2]) + number / x.shape[0]
            for part in y.unbind(1):
                x = x + part[:, None] * (self.count - number + 0.3) * x.shape[1]
        return x


def _watched_fixed(count: int) -> Callable[[], object]:
    made = unflatten(export_preserving(WatchedFixed(count), (torch.randn(3, 5, 4),)))
    return lambda: made.set_submodule("many.0", nn.Linear(4, 4))


MADE = (
    *(_first_call, _table, _plain_table, _refused, _without_calls),
    *(_given_tensors, _returned_tensors, _own_sizes, _plain_sizes, _prefixes, _watched),
    _watched_fixed,
)


@pytest.mark.parametrize("make", MADE)
def test_twice_as_many_take_twice_the_steps(make: Callable[[int], Callable[[], object]]) -> None:
    small, large = (steps(make(count)) for count in (40, 80))
    assert large < 2.1 * small, (small, large)
