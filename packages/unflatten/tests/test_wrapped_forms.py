"""A module of several forms runs the one that its caller means, whatever is put around it."""

from __future__ import annotations

import copy
import io
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowerdeck.unflatten import UnflattenError, unflatten


class Step(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.work = nn.Linear(4, 4)

    def forward(self, x: Tensor, t: float) -> Tensor:
        if t > 0.2:
            x = torch.tanh(self.work(x))
        result: Tensor = x * t + 1
        return result


class Sampler(nn.Module):
    # As diffusion models do: one module, another step each time.
    def __init__(self) -> None:
        super().__init__()
        self.step = Step()
        self.other = Step()

    def forward(self, x: Tensor) -> Tensor:
        for t in (0.5, 0.25, 0.1):
            x = self.step(x, t)
        result: Tensor = self.other(self.other(x, 0.3), 0.1)
        return result


class Around(nn.Module):
    def __init__(self, inner: nn.Module, times: float = 1.0) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.ModuleDict({"held": inner})])
        self.times = times

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner[0]["held"](*args, **kwargs) * self.times  # type: ignore[index]


X = torch.linspace(-1, 1, 8).view(2, 4)


@pytest.fixture(params=[(), ("step", "other")], ids=["flat", "preserved"])
def sampler(request: pytest.FixtureRequest) -> tuple[Any, Sampler]:
    eager = Sampler().eval()
    program = torch.export.export(eager, (X,), preserve_module_call_signature=request.param)
    return unflatten(program), eager


def wrapped(eager: Sampler, times: float) -> Sampler:
    made = copy.deepcopy(eager)
    made.step = Around(made.step, times)  # type: ignore[assignment]
    return made


@pytest.mark.parametrize("times", [1.0, 2.0])
def test_each_call_runs_its_own_form(sampler: tuple[Any, Sampler], times: float) -> None:
    module, eager = sampler
    module.step = Around(Around(module.step), times)
    torch.testing.assert_close(module(X), wrapped(eager, times)(X))


def test_a_wrapper_may_call_more_than_once(sampler: tuple[Any, Sampler]) -> None:
    class Twice(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *args: Any) -> Any:
            return (self.inner(*args) + self.inner(*args)) / 2

    module, eager = sampler
    module.step = Twice(module.step)
    torch.testing.assert_close(module(X), eager(X))


def test_copies_and_pickles_know_the_form(sampler: tuple[Any, Sampler]) -> None:
    module, eager = sampler
    module.step = Around(module.step)
    torch.testing.assert_close(copy.deepcopy(module)(X), eager(X))
    stored = io.BytesIO()
    torch.save(module, stored)
    stored.seek(0)
    torch.testing.assert_close(torch.load(stored, weights_only=False)(X), eager(X))


def test_threads_do_not_share_the_choice(sampler: tuple[Any, Sampler]) -> None:
    module, eager = sampler
    module.step = Around(module.step)

    def run(number: int) -> tuple[Tensor, Tensor]:
        return module(X * number), eager(X * number)

    with ThreadPoolExecutor(8) as pool:
        for found, want in pool.map(run, range(64)):
            torch.testing.assert_close(found, want)


def test_a_failed_call_leaves_no_form_chosen(sampler: tuple[Any, Sampler]) -> None:
    module, eager = sampler
    inner = module.step

    class Fails(Around):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            found = super().forward(*args, **kwargs)
            if self.times:
                raise ValueError("failed")
            return found

    module.step = Fails(inner, 1.0)
    first = inner(X, 0.5) if "t" in inner.code.partition("\n")[0] else inner(X)
    for _ in range(2):
        with pytest.raises(ValueError, match="failed"):
            module(X)
    again = inner(X, 0.5) if "t" in inner.code.partition("\n")[0] else inner(X)
    torch.testing.assert_close(again, first)
    module.step = inner
    torch.testing.assert_close(module(X), eager(X))


def test_compiled_calls_run_their_own_forms(sampler: tuple[Any, Sampler]) -> None:
    module, eager = sampler
    module.step = Around(module.step)
    compiled: Any = torch.compile(module, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(X), eager(X))


def test_a_wrapper_around_another_module_of_several_forms_is_refused(
    sampler: tuple[Any, Sampler],
) -> None:
    module, _ = sampler
    module.step = Around(module.other)
    with pytest.raises(UnflattenError, match=r"'step' was, which is called in several forms"):
        module(X)


def test_code_shows_every_form(sampler: tuple[Any, Sampler]) -> None:
    module, _ = sampler
    code = module.step.code
    assert [line.split("(")[0] for line in code.splitlines() if line.startswith("def")] == [
        *("def forward", "def _call_1", "def _call_2"),
    ]
    shown = module.print_readable(print_output=False)
    assert "class Step(torch.nn.Module):  # step: " in shown
    assert "    def _call_2(" in shown
    compile(shown, "readable", "exec")


def test_exported_again_each_call_runs_its_own_form(sampler: tuple[Any, Sampler]) -> None:
    module, eager = sampler
    module.step = Around(Around(module.step), 2.0)
    again = torch.export.export(module, (X,))
    torch.testing.assert_close(again.module()(X), wrapped(eager, 2.0)(X))
    torch.testing.assert_close(unflatten(again)(X), wrapped(eager, 2.0)(X))


class Outer(nn.Module):
    # Both modules of several forms have one name, and call each other in other forms.
    def __init__(self) -> None:
        super().__init__()
        self.step = Step()

    def forward(self, x: Tensor, t: float) -> Tensor:
        result: Tensor = self.step(self.step(x, t) * t, 1 - t)
        return result


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step = Outer()

    def forward(self, x: Tensor) -> Tensor:
        for t in (0.5, 0.25, 0.9):
            x = self.step(x, t)
        return x


def test_forms_in_forms_of_one_name_are_told_apart() -> None:
    eager = Nested().eval()
    made: Any = unflatten(torch.export.export(eager, (X,)))
    made.step.step = Around(made.step.step)
    torch.testing.assert_close(made(X), eager(X))
    made.step = Around(made.step)
    torch.testing.assert_close(made(X), eager(X))
    made.step = nn.Sequential(made.step)
    torch.testing.assert_close(made(X), eager(X))


def test_two_different_modules_of_forms_in_one_wrapper_are_refused() -> None:
    made: Any = unflatten(torch.export.export(Nested().eval(), (X,)))
    other: Any = unflatten(torch.export.export(Sampler().eval(), (X,)))
    made.step = nn.Sequential(made.step, other.step)
    with pytest.raises(UnflattenError, match="several forms"):
        made(X)
