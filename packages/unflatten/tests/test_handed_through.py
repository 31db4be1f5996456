"""Modules that only hand a value through can be replaced: others read what they had all along."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowerdeck.unflatten import UnflattenError, export_preserving, unflatten


class Norm(nn.Module):
    # As in LLaMA: the conversion returns its argument, which is the residual of the caller.
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32).contiguous()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return torch.mul(self.weight, scaled.to(x.dtype))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm()
        self.work = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.add(x, self.work(self.norm(x)))


class HandsOn(nn.Module):
    # The argument is given to another module, and returned by the caller and by the whole.
    def __init__(self) -> None:
        super().__init__()
        self.inner = Residual()
        self.norm = Norm()
        self.work = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.inner(x)
        z = self.norm(y)
        return z, self.work(y), y, x


class Increase(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.add_(1)
        return x.sum(-1)


class Changes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.increase = Increase()
        self.work = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = x * 2
        total = self.increase(y)
        return total, self.work(y), y + 1


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.Sequential(nn.Sequential(Norm()), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = x.sin()
        added: Tensor = self.outer(y) + y
        return added


class Same(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.float32)


class ReturnsIt(nn.Module):
    # What the child returns is its argument: whoever reads it may mean either.
    def __init__(self) -> None:
        super().__init__()
        self.same = Same()
        self.work = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.same(x * 2)
        worked: Tensor = self.work(y)
        return worked


MODELS: tuple[Callable[[], nn.Module], ...] = (
    *(Residual, HandsOn, Changes, Deep, ReturnsIt),
    lambda: nn.Sequential(HandsOn().inner, Residual(), Residual()),
)


def swaps(eager: nn.Module, args: tuple[Any, ...]) -> dict[str, tuple[nn.Module, nn.Module]]:
    """Return for each child the unflattened module in which it is eager's, and eager."""
    paths = [name for name, _ in eager.named_modules() if name]
    program = torch.export.export(eager, args, preserve_module_call_signature=tuple(paths))
    found: dict[str, tuple[nn.Module, nn.Module]] = {}
    for path in paths:
        made = unflatten(program)
        made.set_submodule(path, eager.get_submodule(path))
        found[path] = (made, eager)
    return found


@pytest.mark.parametrize("model", MODELS)
def test_each_child_can_be_replaced_by_eagers(model: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    x = torch.rand(2, 4)
    for path, (made, eager) in swaps(model().eval(), (x,)).items():
        for found, want in zip(made(x.clone()), eager(x.clone()), strict=True):
            torch.testing.assert_close(found, want, msg=path)


def test_residual_is_not_what_a_replacement_returns() -> None:
    eager, x = Residual().eval(), torch.rand(2, 4)
    program = torch.export.export(eager, (x,), preserve_module_call_signature=("norm",))
    made = unflatten(program)
    made.norm = nn.Tanh()
    torch.testing.assert_close(made(x), x + eager.work(torch.tanh(x)))


def test_result_that_is_the_argument_is_what_a_replacement_returns() -> None:
    eager, x = ReturnsIt().eval(), torch.rand(2, 4)
    made = unflatten(export_preserving(eager, (x,)))
    made.same = nn.Tanh()
    torch.testing.assert_close(made(x), eager.work(torch.tanh(x * 2)))
    # Who reads it may mean the argument, and torch's program does not tell.
    program = torch.export.export(eager, (x,), preserve_module_call_signature=("same",))
    made = unflatten(program)
    (row,) = (row for row in made.swappable().rows if row.path == "same")
    assert "must return as its result what it is given or holds" in row.reason
    made.same = nn.Tanh()
    with pytest.raises(UnflattenError, match="'same' returned as its result something else"):
        made(x)


def test_argument_is_not_changed_where_a_replacement_does_not() -> None:
    class Total(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sum(-1)

    eager, x = Changes().eval(), torch.rand(2, 4)
    program = torch.export.export(eager, (x,), preserve_module_call_signature=("increase",))
    made = unflatten(program)
    made.increase = Total()
    total, worked, more = made(x)
    torch.testing.assert_close(total, (x * 2).sum(-1))
    torch.testing.assert_close(worked, eager.work(x * 2))
    torch.testing.assert_close(more, x * 2 + 1)


class Biased(nn.Module):
    """Returns an argument beside its result, as layers do that share a bias of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.work = nn.Linear(4, 4)

    def forward(self, x: Tensor, bias: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return self.work(x) + bias, {"bias": bias}


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Biased(), Biased()

    def forward(self, x: Tensor) -> Tensor:
        x, more = self.first(x, x.sum(-1, keepdim=True))
        found: Tensor = self.second(x, more["bias"])[0]
        return found


class Around(nn.Module):
    def __init__(self, inner: Any, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = inner
        self.change = change

    def forward(self, x: Tensor, bias: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        x, more = self.inner(x, bias)
        return x, {"bias": self.change(more["bias"])}


def unchanged(bias: Tensor) -> Tensor:
    return bias


def same_memory(bias: Tensor) -> Tensor:
    return bias.view_as(bias)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("change", [unchanged, same_memory])
def test_a_module_that_returns_its_argument_is_replaced(
    change: Callable[[Tensor], Tensor], strict: bool
) -> None:
    eager, x = Stack(), torch.randn(3, 4)
    module: Any = unflatten(export_preserving(eager, (x,), strict=strict))
    for inner in (module.first, Biased()):
        module.first = Around(inner, change)
        expected = Stack()
        expected.load_state_dict(eager.state_dict())
        expected.first = Around(inner, change)  # type: ignore[assignment]
        torch.testing.assert_close(module(x), expected(x))
        torch.testing.assert_close(torch.func.vjp(module, x)[0], expected(x))
    assert module.to("meta")(x.to("meta")).shape == x.shape


def exported(eager: nn.Module, x: Tensor, how: str) -> Any:
    if how == "ours":
        return export_preserving(eager, (x,))
    names = tuple(name for name, _ in eager.named_modules() if name)
    return torch.export.export(eager, (x,), preserve_module_call_signature=names)


def with_another(module: Any, way: str) -> Any:
    if way == "hooked":
        module.first.register_forward_hook(
            lambda _module, _args, found: (found[0], {"bias": found[1]["bias"] * 2})
        )
        return module
    torch.manual_seed(1)
    inner = module.first if way == "wrapped" else Biased()
    module.first = Around(inner, lambda bias: bias * 2)
    return module


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("way", ["wrapped", "replaced", "hooked"])
def test_whoever_returns_another_thing_than_the_argument_is_told(way: str, compiled: bool) -> None:
    """Eager's caller may read either afterwards: torch's program has one value for both."""
    eager, x = Stack(), torch.randn(3, 4)
    program = exported(eager, x, "torch's")
    module = with_another(unflatten(program), way)
    run = torch.compile(module, backend="eager") if compiled else module
    # Dynamo asks tensors for their gradients, which warns.
    with (
        torch.no_grad(),
        pytest.raises(Exception, match=r"'first' returned as its result\[1\]\['bias'\]") as told,
    ):
        run(x)
    assert compiled or type(told.value) is UnflattenError
    # What nobody reads afterwards may be anything.
    module = unflatten(program)
    module.second = Around(module.second, lambda bias: bias * 2)
    torch.testing.assert_close(module(x), eager(x))


@pytest.mark.parametrize("way", ["wrapped", "replaced", "hooked"])
def test_our_programs_tell_the_two_apart(way: str) -> None:
    eager, x = Stack(), torch.randn(3, 4)
    module = with_another(unflatten(exported(eager, x, "ours")), way)
    torch.testing.assert_close(module(x), with_another(eager, way)(x))


class Sometimes(nn.Module):
    """Returns its argument in one of its calls, which differ in their structure."""

    def forward(self, x: Tensor, factor: float | None = None) -> Tensor:
        return x if factor is None else x * factor


class CallsSometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.child = Sometimes()

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.child(x).sin() + self.child(x, factor=2.0)
        return made


@pytest.mark.parametrize("strict", [False, True])
def test_a_call_without_a_signature_that_returns_its_argument_is_one(strict: bool) -> None:
    """A hook ran in the other call alone, without a word."""
    eager, x = CallsSometimes(), torch.randn(2, 3)
    made: Any = unflatten(export_preserving(eager, (x,), strict=strict))
    for module in (eager, made):
        module.child.register_forward_hook(lambda _, args, result: result + 1)
    torch.testing.assert_close(made(x), eager(x))
