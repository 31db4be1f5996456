"""Sizes that follow from a module's own arguments, however export computes them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from lowerdeck.unflatten import InputConstraintError, export_preserving, unflatten

EXPRESSIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "t": lambda x: x + 1,
    "b*t": lambda x: x.reshape(1, -1, 8),
    "b+t": lambda x: torch.cat([x[:1], x[:, :1].transpose(0, 1)], 1),
    "t*t": lambda x: (x[:, :, None] * x[:, None]).flatten(1, 2),
    "t//2": lambda x: x[:, : x.shape[1] // 2],
    "(t+1)//2": lambda x: x[:, ::2],
    "2*b*t": lambda x: torch.cat([x, x]).reshape(1, -1, 8),
    "t-1": lambda x: x[:, 1:],
    "t + t%3": lambda x: torch.cat([x, x[:, : x.shape[1] % 3]], 1),
    "t*(t//2)": lambda x: (x[:, :, None] * x[:, None, : x.shape[1] // 2]).flatten(1, 2),
}
"""What the second size of an argument is, by the sizes ``b`` and ``t`` of the whole's."""


class Mean(nn.Module):
    """Reads the size of its argument, and multiples of it."""

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[1]
        return x - x.sum(1, keepdim=True) / (size * 2 + 1) + torch.arange(size * 3).sum()


class Front(nn.Module):
    """Reads a part of the size, which the whole's size may be."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, : x.shape[1] // 2 + 1].sum(1) / x.shape[1]


class Pool(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean, self.front = Mean(), Front()

    def forward(self, x: Tensor) -> Tensor:
        front: Tensor = self.front(self.mean(x))
        return front


class Whole(nn.Module):
    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.before, self.pool = nn.Linear(8, 8), Pool()
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        pooled: Tensor = self.pool(self.change(self.before(x)))
        return pooled


class Shorter(nn.Module):
    """Gives what it holds another size than it is given."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(x[:, : x.shape[1] // 2])


def _swap(module: Any, eager: nn.Module, path: str) -> None:
    module.set_submodule(path, copy.deepcopy(eager.get_submodule(path)))


def _wrap(module: Any, _: nn.Module, path: str) -> None:
    module.set_submodule(path, Shorter(module.get_submodule(path)))


def _before(module: Any, _: nn.Module, path: str) -> None:
    module.get_submodule(path).register_forward_pre_hook(
        lambda _, args: (args[0][:, : args[0].shape[1] // 2],)
    )


def _after(module: Any, _: nn.Module, path: str) -> None:
    if path != "pool":  # nobody reads the size of what that returns
        module.get_submodule(path).register_forward_hook(lambda _, __, y: y[:, :-1])


READ_BY_THE_WHOLE = frozenset({"t//2", "t + t%3", "t*(t//2)"})
"""Where the whole's own code reads sizes of what its child returns."""

CHANGES = (_swap, _wrap, _before, _after)


@pytest.fixture(scope="module", params=["preserving", "plain"])
def programs(request: pytest.FixtureRequest) -> dict[str, tuple[nn.Module, ExportedProgram]]:
    export = export_preserving if request.param == "preserving" else torch.export.export
    found: dict[str, tuple[nn.Module, ExportedProgram]] = {}
    for text, change in EXPRESSIONS.items():
        eager, x = Whole(change).eval(), torch.randn(4, 6, 8)
        sizes = ({0: Dim.AUTO, 1: Dim.AUTO},)
        found[text] = (eager, export(eager, (x,), dynamic_shapes=sizes))
    return found


SHAPES = ((4, 6, 8), (3, 10, 8), (7, 9, 8))


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_no_module_needs_what_others_compute(
    programs: dict[str, tuple[nn.Module, ExportedProgram]], text: str
) -> None:
    eager, program = programs[text]
    made: Any = unflatten(program, preserve="all")
    assert all(row.callable_alone for row in made.swappable())
    for shape in SHAPES:
        x = eager.get_submodule("before")(torch.randn(shape))
        argument = EXPRESSIONS[text](x)
        for path in ("pool", "pool.mean", "pool.front"):
            wanted = eager.get_submodule(path)(argument)
            torch.testing.assert_close(made.get_submodule(path)(argument), wanted)


@pytest.mark.parametrize("text", EXPRESSIONS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_module_computes_what_eagers_does(
    programs: dict[str, tuple[nn.Module, ExportedProgram]],
    text: str,
    change: Callable[[Any, nn.Module, str], None],
) -> None:
    eager, program = programs[text]
    for path in ("before", "pool", "pool.mean", "pool.front"):
        if path == "before" and change is not _swap and text in READ_BY_THE_WHOLE:
            continue
        made, want = unflatten(program, preserve="all"), copy.deepcopy(eager)
        for each in (made, want):
            change(each, eager, path)
        # A change that returns another size is refused; with that switched off, the modules
        # around it compute what they do of their own arguments.
        made.check_input_constraints = change is _swap
        for shape in SHAPES:
            x = torch.randn(shape)
            wanted = want(x)
            torch.testing.assert_close(made(x), wanted)
        made.check_input_constraints, x = True, torch.randn(4, 7, 8)
        if path == "before" and change is not _swap:
            with pytest.raises(InputConstraintError, match=r"'before' of .* was changed"):
                made(x)


class Two(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x.sum(1) / x.shape[1] + y.sum(1) / y.shape[1]


class TwoOfOneSize(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.two = Two()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.two(x, x.exp())
        return y


@pytest.mark.parametrize("export", [torch.export.export, export_preserving])
def test_sizes_that_were_equal_must_stay_so(export: Callable[..., ExportedProgram]) -> None:
    # The program has one size for both, and does not tell where eager's reads which.
    eager, x = TwoOfOneSize(), torch.randn(4, 6, 8)
    program = export(eager, (x,), dynamic_shapes=({1: Dim("t")},))
    made: Any = unflatten(program, preserve="all")
    made.two.register_forward_pre_hook(lambda _, args: (args[0], args[1][:, ::2]))
    with pytest.raises(InputConstraintError, match=r"y?.*shape\[1\] == .*shape\[1\]; found"):
        made(x)
    made = unflatten(program, preserve="all")
    for y in (x, torch.randn(4, 9, 8)):
        torch.testing.assert_close(made.two(y, y + 1), eager.two(y, y + 1))


class Halves(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1) / (x.shape[1] // 2)


class TwiceAsLong(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.halves = Halves()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.halves(torch.cat([x, x], 1))
        return y


@pytest.mark.parametrize("export", [torch.export.export, export_preserving])
def test_a_size_that_no_recorded_one_leads_to_is_refused(
    export: Callable[..., ExportedProgram],
) -> None:
    eager, x = TwiceAsLong(), torch.randn(4, 6, 8)
    made: Any = unflatten(export(eager, (x,), dynamic_shapes=({1: Dim("t")},)), preserve="all")
    for length in (4, 10):
        y = torch.randn(4, length, 8)
        torch.testing.assert_close(made.halves(y), eager.halves(y))
    with pytest.raises(InputConstraintError, match=r"% 2 == 0; found .* = 5"):
        made.halves(torch.randn(4, 5, 8))


@pytest.mark.parametrize("whole", [TwiceAsLong, TwoOfOneSize])
@pytest.mark.parametrize("export", [torch.export.export, export_preserving])
def test_what_is_compared_and_divided_can_be_traced(
    whole: Callable[[], nn.Module], export: Callable[..., ExportedProgram]
) -> None:
    eager, sizes = whole(), ({1: Dim("t")},)
    program = export(eager, (torch.randn(4, 6, 8),), dynamic_shapes=sizes)
    made: Any = unflatten(program, preserve="all")
    other = torch.randn(4, 10, 8)
    traced: Any = torch.fx.symbolic_trace(made)
    compiled: Any = torch.compile(made, backend="eager", fullgraph=True, dynamic=True)
    for found in (traced(other), compiled(other)):
        torch.testing.assert_close(found, eager(other))
    for strict in (False, True):
        again = torch.export.export(
            made, (torch.randn(4, 6, 8),), dynamic_shapes=sizes, strict=strict
        )
        torch.testing.assert_close(again.module()(other), eager(other))


class Handed(nn.Module):
    """Reads numbers that its caller leaves it, which are no arguments."""

    rows: Any = 1
    length: Any = 1

    def forward(self, x: Tensor) -> Tensor:
        return x.view(self.rows, self.length, -1).sum(1) / x.shape[0]


class Hands(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.handed = nn.Linear(8, 8), Handed()

    def forward(self, x: Tensor) -> Tensor:
        self.handed.rows, self.handed.length = x.shape[:2]
        y: Tensor = self.handed(self.before(x).reshape(-1, 8))
        self.handed.rows = self.handed.length = 1
        return y


@pytest.mark.parametrize("export", [torch.export.export, export_preserving])
def test_numbers_from_outside_are_compared_with_the_arguments(
    export: Callable[..., ExportedProgram],
) -> None:
    eager, x = Hands(), torch.randn(4, 6, 8)
    program = export(eager, (x,), dynamic_shapes=({0: Dim.AUTO, 1: Dim.AUTO},))
    made: Any = unflatten(program, preserve="all")
    for shape in SHAPES:
        y = torch.randn(shape)
        torch.testing.assert_close(made(y), eager(y))
    made.handed.register_forward_pre_hook(
        lambda _, args: (torch.cat([args[0], args[0]]), *args[1:])
    )
    with pytest.raises(InputConstraintError, match=r"\[0\] .*(must be 24.* 48|found .* = 48)"):
        made(x)
