"""A preserved call asks its own arguments for sizes: it can be called alone, and replaced."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowerdeck.unflatten import InputConstraintError, export_preserving, unflatten
from lowerdeck.unflatten.calls.carrying import CARRIED


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        split = self.project(x).view(batch, length, 2, 4).transpose(1, 2)
        joined: Tensor = split.transpose(1, 2).flatten(2)
        return joined + torch.arange(batch * length).sum()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = Heads()
        self.more = Heads()

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = x + self.heads(x)
        more: Tensor = added + self.more(added)
        return more


class Blocks(nn.Module):
    # The first asks for sizes that all the others read.
    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.second = Block()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.second(self.first(x))
        return y, torch.ones(x.shape[0] * x.shape[1]), torch.ones(x.shape[0])


class Counts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        count = x.shape[0] * x.shape[1] + 1
        return torch.arange(count) + x.sum()


class Doubled(nn.Module):
    # The arguments have two rows for one of the whole's.
    def forward(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0] // 2, 2, -1).sum(1)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()
        self.doubled = Doubled()
        self.again = Counts()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.doubled(torch.cat([x, x]).flatten(1))
        return self.counts(x), y, self.again(x), torch.ones(x.shape[0] * x.shape[1])


class Halves(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0] * 2, -1).sum(1) + torch.arange(x.shape[0] * 2)


class Last(nn.Module):
    # Export asks the whole's argument for the size, in the last module, which is given another.
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)
        self.halves = Halves()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = x + self.project(x)
        return y, self.halves(y)


MODELS: tuple[Callable[[], nn.Module], ...] = (Blocks, Twice, Block, Last)


def exported(eager: nn.Module) -> torch.export.ExportedProgram:
    paths = tuple(name for name, _ in eager.named_modules() if name)
    sizes = {
        0: torch.export.Dim("rows", min=2, max=9),
        1: torch.export.Dim("length", min=2, max=9),
    }
    return torch.export.export(
        eager,
        (torch.rand(3, 5, 8),),
        dynamic_shapes=(sizes,),
        preserve_module_call_signature=paths,
    )


@pytest.mark.parametrize("model", MODELS)
def test_each_child_can_be_replaced_by_eagers(model: Callable[[], nn.Module]) -> None:
    eager = model().eval()
    program = exported(eager)
    for path in [name for name, _ in eager.named_modules() if name]:
        made = unflatten(program)
        made.set_submodule(path, eager.get_submodule(path))
        for shape in ((3, 5, 8), (2, 4, 8), (7, 2, 8)):
            x = torch.rand(shape)
            for found, want in zip(made(x), eager(x), strict=True):
                torch.testing.assert_close(found, want, msg=path)


@pytest.mark.parametrize("model", MODELS)
def test_each_child_can_be_called_alone(model: Callable[[], nn.Module]) -> None:
    eager = model().eval()
    made = unflatten(exported(eager))
    calls: list[tuple[str, Any, Any]] = []
    for name, child in eager.named_modules():
        if name:
            child.register_forward_hook(
                lambda _, args, result, name=name: calls.append((name, args, result))
            )
    for shape in ((3, 5, 8), (2, 4, 8), (7, 2, 8)):
        eager(torch.rand(shape))
    for name, args, result in list(calls):
        torch.testing.assert_close(made.get_submodule(name)(*args), result, msg=name)


def test_no_hidden_argument_shows() -> None:
    made = unflatten(exported(Blocks().eval()))
    seen: list[dict[str, Any]] = []
    for child in made.modules():
        assert CARRIED not in getattr(child, "code", "")
        child.register_forward_pre_hook(
            lambda _, __, kwargs: seen.append(kwargs),
            with_kwargs=True,
        )
    made(torch.rand(3, 5, 8))
    assert seen
    assert not any(seen)


class Counted(nn.Module):
    # Numbers that are read out of tensors, each of another one that has no argument.
    def forward(self, x: Tensor) -> tuple[Any, ...]:
        some = torch.full((2,), 2).sum().item()
        more = torch.full((3,), 3).sum().item()
        return some, more, x


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.counted = Counted()
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        some, more, same = self.counted(x)
        return self.last(same), x * some, x * more


def test_numbers_read_out_of_tensors_are_not_mixed_up() -> None:
    eager, x = Reads().eval(), torch.rand(2, 3, 8)
    program = torch.export.export(eager, (x,), preserve_module_call_signature=("last",))
    for preserve in (None, "all"):
        for found, want in zip(unflatten(program, preserve=preserve)(x), eager(x), strict=True):
            torch.testing.assert_close(found, want)


class Rows(nn.Module):
    def forward(self, x: Tensor, count: Tensor) -> Tensor:
        rows: Any = count.item()
        torch._check(rows >= 0)  # type: ignore[no-untyped-call]
        torch._check(rows <= 2)  # type: ignore[no-untyped-call]
        return x.narrow(0, 0, rows) * 2


class Shares(nn.Module):
    # Both read one number out of one tensor: export lets the second read what the first has read.
    def __init__(self) -> None:
        super().__init__()
        self.first = Rows()
        self.second = Rows()

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        count = mask.sum()
        return self.first(x, count), self.second(x + 1, count)


def test_a_number_that_another_module_read_out_of_an_argument_is_read_again() -> None:
    eager, x = Shares().eval(), torch.rand(2, 8)
    paths = ("first", "second")
    plain: Any = unflatten(torch.export.export(eager, (x, torch.tensor([1, 0]))), preserve="all")
    assert all(row.callable_alone for row in plain.swappable())
    torch.testing.assert_close(plain.second(x, torch.tensor(1)), eager.second(x, torch.tensor(1)))
    program = torch.export.export(
        eager, (x, torch.tensor([1, 0])), preserve_module_call_signature=paths
    )
    for path in paths:
        made = unflatten(program)
        assert all(row.replaceable and row.callable_alone for row in made.swappable())
        for mask in (torch.tensor([1, 0]), torch.tensor([1, 1])):
            wanted = eager.second(x, mask.sum())
            torch.testing.assert_close(made.get_submodule(path)(x, mask.sum()), wanted)
        made.set_submodule(path, eager.get_submodule(path))
        for mask in (torch.tensor([1, 0]), torch.tensor([1, 1])):
            for found, want in zip(made(x, mask), eager(x, mask), strict=True):
                torch.testing.assert_close(found, want)


class Makes(nn.Module):
    """Makes a tensor of a size that a number in its argument tells."""

    def forward(self, x: Tensor) -> Tensor:
        size: Any = x.argmax().item()
        torch._check(size >= 0)  # type: ignore[no-untyped-call]
        torch._check(size < 100)  # type: ignore[no-untyped-call]
        return torch.ones(size, 4)


class Chooses(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.unsqueeze(-1).expand(-1, 4)[x > 0]


class Holds(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.inner(x)
        return y * 2, y.sum()


class ReadsSize(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.holds = Holds(inner)
        self.work = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        y, _ = self.holds(x)
        return self.work(y), torch.ones(y.shape[0] + 1), y.shape[0] * 3


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("make", [Makes, Chooses])
def test_a_size_that_only_data_tell_is_asked_of_what_was_returned(
    make: Callable[[], nn.Module], strict: bool
) -> None:
    eager, x, other = ReadsSize(make()), torch.tensor([1.0, -1, 3]), torch.tensor([4.0, 5, -1])
    program = export_preserving(eager, (x,), strict=strict)
    module: Any = unflatten(program)
    assert all(row.replaceable and row.callable_alone for row in module.swappable())
    hooked: list[Any] = []
    module.holds.inner.register_forward_hook(lambda *given: hooked.append(given[2]))
    for each in (x, other):
        torch.testing.assert_close(module(each), eager(each))
        torch.testing.assert_close(module.holds.inner(each), eager.holds.inner(each))
        torch.testing.assert_close(module.holds(each), eager.holds(each))
    assert all(isinstance(found, Tensor) for found in hooked)
    for path in ("holds.inner", "holds", "work"):
        module = unflatten(program)
        module.set_submodule(path, copy.deepcopy(eager.get_submodule(path)))
        for each in (x, other):
            torch.testing.assert_close(module(each), eager(each))


class Adds(nn.Module):
    """Reads a size that both its arguments tell."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x.sum() / x.shape[1] + y.sum()


class HalfOf(nn.Module):
    """Reads half a size, which its argument had twice when it was recorded."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sum() / (x.shape[1] // 2)


class Switched(nn.Module):
    """Gives them what is twice as long."""

    def __init__(self) -> None:
        super().__init__()
        self.adds, self.half_of = Adds(), HalfOf()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = torch.cat([x, x], 1)
        return self.adds(x, y), self.half_of(y), torch.ones(x.shape[1])


@pytest.mark.parametrize("how", ["preserving", "flat"])
def test_checks_of_sizes_can_be_switched_off(how: str) -> None:
    x, sizes = torch.rand(4, 6, 8), ({0: torch.export.Dim("b"), 1: torch.export.Dim("t")},)
    export: Any = export_preserving if how == "preserving" else torch.export.export
    eager = Switched()
    whole: Any = unflatten(export(eager, (x,), dynamic_shapes=sizes), preserve="all")
    odd = torch.rand(4, 13, 8)
    for module in (whole, copy.deepcopy(whole)):
        compiled: Any = torch.compile(module, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(x), eager(x))
        with pytest.raises(InputConstraintError, match=r"found .* = 6, .* = 13"):
            module.adds(x, odd)
        with pytest.raises(InputConstraintError, match=r"% 2 == 0; found .* = 13"):
            module.half_of(odd)
        module.check_input_constraints = False
        torch.testing.assert_close(module.adds(x, odd), eager.adds(x, odd))
        torch.testing.assert_close(module.half_of(odd), eager.half_of(odd))
        module.check_input_constraints = True
        with pytest.raises(InputConstraintError, match="= 13"):
            module.half_of(odd)


class CountsTokens(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[0] * x.shape[1]
        return x.mean() + n * 0.1


class CountsAfterAMode(nn.Module):
    """Export asks for all sizes at the beginning, before another call switches a mode."""

    def __init__(self, mode: Any) -> None:
        super().__init__()
        self.count, self.again, self.mode = CountsTokens(), CountsTokens(), mode

    def forward(self, x: Tensor) -> Tensor:
        total = x.mean()
        with self.mode():
            total = total + self.again(x) + x.shape[1]
        counted: Tensor = total + self.count(x)
        return counted


@pytest.mark.parametrize("dims", [{0}, {1}, {0, 1}])
@pytest.mark.parametrize("mode", [torch.no_grad, lambda: torch.autocast("cpu")])
def test_a_mode_switched_beside_a_module_does_not_part_it(mode: Any, dims: set[int]) -> None:
    x, other = torch.randn(5, 12, 8), torch.randn(5 + (0 in dims), 12 + (1 in dims), 8)
    eager = CountsAfterAMode(mode)
    varying = (dict.fromkeys(dims, torch.export.Dim.DYNAMIC),)
    made: Any = unflatten(export_preserving(eager, (x,), dynamic_shapes=varying))
    assert all(row.replaceable and row.callable_alone for row in made.swappable().rows)
    torch.testing.assert_close(made(other), eager(other))
    torch.testing.assert_close(made.count(other), eager.count(other))
    for model in (eager, made):
        model.count = CountsHalves(model.count)
    torch.testing.assert_close(made(other), eager(other))


class CountsHalves(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        halved: Tensor = self.inner(x / 2)
        return halved
