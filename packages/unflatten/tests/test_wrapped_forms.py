"""A module of several forms runs the one that its caller means, whatever is put around it."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowerdeck.unflatten import (
    InputConstraintError,
    UnflattenError,
    export_preserving,
    unflatten,
)


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


@pytest.fixture(autouse=True)
def forget_compiled() -> None:
    # All modules of several forms share one function: a compiler counts what it made of it.
    torch._dynamo.reset()


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
    first = called_alone(inner, 0.5)
    for _ in range(2):
        with pytest.raises(ValueError, match="failed"):
            module(X)
    torch.testing.assert_close(called_alone(inner, 0.5), first)
    module.step = inner
    torch.testing.assert_close(module(X), eager(X))


def test_compiled_calls_run_their_own_forms(sampler: tuple[Any, Sampler]) -> None:
    module, eager = sampler
    module.step = Around(module.step)
    compiled: Any = torch.compile(module, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(X), eager(X))


def on_a_new_thread(call: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


@pytest.mark.parametrize("where", ["around", "inside"])
def test_a_compiler_may_be_the_first_on_a_thread(sampler: tuple[Any, Sampler], where: str) -> None:
    """It noted that nothing had been told yet, and that this was no longer so after tracing."""
    module, eager = sampler
    module.step = Around(module.step)
    if where == "inside":
        module.step = torch.compile(module.step, backend="eager")
    compiled: Any = torch.compile(module, backend="eager") if where == "around" else module
    with torch.no_grad():
        want = eager(X)

    def run() -> Any:
        with torch.no_grad():
            return compiled(X), compiled(X)

    for found in on_a_new_thread(run):
        torch.testing.assert_close(found, want)


def called_alone(module: Any, t: float) -> Any:
    """Call a module of several forms with nothing that tells the form but a constant."""
    if "t" in module.code.partition("\n")[0]:
        return module(X, t)
    with pytest.raises(InputConstraintError, match="fit the forms"):
        module(X)
    return module.call_modules()[[0.5, 0.25, 0.1].index(t)](X)


def test_a_call_alone_runs_the_form_that_its_constants_tell(sampler: tuple[Any, Sampler]) -> None:
    module, eager = sampler
    for t in (0.1, 0.5, 0.25):
        torch.testing.assert_close(called_alone(module.step, t), eager.step(X, t))


def test_constants_that_no_form_has_are_refused() -> None:
    program = torch.export.export(Sampler(), (X,), preserve_module_call_signature=("step",))
    step: Any = unflatten(program).step
    with pytest.raises(InputConstraintError, match="fit none of them"):
        step(X, 0.75)


def test_each_form_stands_alone(sampler: tuple[Any, Sampler]) -> None:
    module, eager = sampler
    forms = module.step.call_modules()
    for form, t in zip(forms, (0.5, 0.25, 0.1), strict=True):
        given = (X, t) if "t" in form.code.partition("\n")[0] else (X,)
        torch.testing.assert_close(form(*given), eager.step(X, t))


class Hidden(nn.Module):
    """Holds the inner module where nobody finds it, and calls it as ``how`` does."""

    def __init__(self, inner: nn.Module, how: Any) -> None:
        super().__init__()
        self.held = [inner]
        self.how = how

    def forward(self, *args: Any) -> Any:
        return self.how(self.held[0], *args)


def plainly(inner: Any, *args: Any) -> Any:
    return inner(*args)


def recomputed(inner: Any, *args: Any) -> Any:
    return checkpoint(inner, *args, use_reentrant=False)


def on_another_thread(inner: Any, *args: Any) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(inner, *args).result()


def test_a_module_that_nobody_finds_runs_its_own_forms(sampler: tuple[Any, Sampler]) -> None:
    module, eager = sampler
    module.step = Hidden(module.step, plainly)
    torch.testing.assert_close(module(X), eager(X))
    step = module.step.held[0]
    module.step = Hidden(partial(step), plainly)  # type: ignore[arg-type]
    torch.testing.assert_close(module(X), eager(X))


@pytest.mark.parametrize("how", [on_another_thread, recomputed])
def test_where_no_choice_reaches_arguments_tell_or_it_is_refused(
    sampler: tuple[Any, Sampler], how: Any
) -> None:
    module, eager = sampler
    is_flat = "t" not in module.step.code.partition("\n")[0]
    module.step = Hidden(module.step, how)
    given, same = X.clone().requires_grad_(), X.clone().requires_grad_()
    if is_flat:
        with pytest.raises(InputConstraintError, match="on another thread"):
            module(given).sum().backward()
        return
    result, want = module(given), eager(same)
    torch.testing.assert_close(result, want)
    result.sum().backward()
    want.sum().backward()
    torch.testing.assert_close(given.grad, same.grad)


@pytest.mark.parametrize("whole", [False, True])
def test_a_compiled_module_runs_its_own_forms(sampler: tuple[Any, Sampler], whole: bool) -> None:
    module, eager = sampler
    module.step = torch.compile(module.step, fullgraph=True, backend="eager")
    subject: Any = torch.compile(module, fullgraph=True, backend="eager") if whole else module
    with torch.no_grad():
        torch.testing.assert_close(subject(X), eager(X))


def test_a_module_compiled_in_place_runs_its_own_forms(sampler: tuple[Any, Sampler]) -> None:
    module, eager = sampler
    module.step.compile(fullgraph=True, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(module(X), eager(X))


def test_a_forward_put_in_place_is_called_in_every_form(sampler: tuple[Any, Sampler]) -> None:
    module, eager = sampler
    inner = module.step.forward
    module.step.forward = lambda *args: inner(*args) * 2
    torch.testing.assert_close(module(X), wrapped(eager, 2.0)(X))


def test_a_symbolic_trace_of_a_module_of_several_forms_is_refused(
    sampler: tuple[Any, Sampler],
) -> None:
    module, _ = sampler
    with pytest.raises(InputConstraintError, match="while something traces the module alone"):
        torch.fx.symbolic_trace(module.step)


@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")
def test_strict_export_follows_a_wrapper(sampler: tuple[Any, Sampler]) -> None:
    module, eager = sampler
    module.step = Around(module.step)
    again = torch.export.export(module, (X,), strict=True)
    torch.testing.assert_close(again.module()(X), eager(X))


def test_modules_whose_places_are_exchanged_run_no_other_form(
    sampler: tuple[Any, Sampler],
) -> None:
    module, _ = sampler
    module.step, module.other = module.other, module.step
    # ``other`` was never called with 0.5: what that computes is not in the program.
    with pytest.raises(InputConstraintError, match="fit"):
        module(X)


def test_a_part_of_another_copy_of_the_program_has_the_same_forms() -> None:
    eager = Sampler().eval()
    program = torch.export.export(eager, (X,))
    module: Any = unflatten(program)
    other: Any = unflatten(program)
    module.step = other.step
    torch.testing.assert_close(module(X), eager(X))
    module.step = nn.Sequential(copy.deepcopy(other.step))
    torch.testing.assert_close(module(X), eager(X))


def test_a_wrapper_around_another_module_runs_the_form_that_both_have() -> None:
    eager = Sampler().eval()
    module: Any = unflatten(torch.export.export(eager, (X,)))
    module.step = Around(module.other)
    with pytest.raises(InputConstraintError, match="which of them is meant"):
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


class HandsOn(nn.Module):
    """Hands on the attributes of what it holds, as wrappers of adapters and compilers do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.scale = inner, nn.Parameter(torch.tensor(3.0))

    def forward(self, *args: Any) -> Any:
        return self.inner(*args) * self.scale

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


def pickled(module: Any) -> Any:
    return pickle.loads(pickle.dumps(module))


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, pickled])
def test_what_hands_on_attributes_is_copied_itself(copied: Any) -> None:
    """A method by which a module copies itself would be taken for the wrapper's."""
    for how in (torch.export.export, export_preserving):
        made: Any = unflatten(how(Sampler().eval(), (X,)))
        made.step = HandsOn(made.step)
        other = copied(made)
        assert isinstance(other.step, HandsOn)
        torch.testing.assert_close(other(X), made(X))
        whole = HandsOn(made)
        assert isinstance(copied(whole), HandsOn)
        torch.testing.assert_close(copied(whole)(X), whole(X))


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy])
def test_a_copy_and_what_it_is_of_look_at_what_they_call(copied: Any) -> None:
    made: Any = unflatten(export_preserving(Sampler().eval(), (X,)))
    wanted, other = made(X), copied(made)
    other.step.register_forward_hook(lambda _module, _args, result: result[:, :2])
    with pytest.raises(InputConstraintError, match="'step'"):
        other(X)
    if other.step is not made.step:
        torch.testing.assert_close(made(X), wanted)
        return
    with pytest.raises(InputConstraintError, match="'step'"):
        made(X)


class Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.work = nn.Linear(4, 4)

    def forward(self, x: Tensor, depth: int) -> Tensor:
        result: Tensor = torch.tanh(self.work(x))
        return self(result, depth - 1) + depth if depth else result


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step = Recursive()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.step(self.step(x, 2), 1)
        return result


@pytest.mark.parametrize("how", [torch.export.export, export_preserving])
def test_a_module_that_calls_itself_runs_its_forms_and_is_not_wrapped(how: Any) -> None:
    """Eager's wrapper is called by the inner calls, too, which the program does not have."""
    eager: Any = Deep().eval()
    made: Any = unflatten(how(eager, (X,)))
    torch.testing.assert_close(made(X), eager(X))
    made.step = Hidden(made.step, plainly)
    with pytest.raises(UnflattenError, match="or by itself"):
        made(X)


def test_two_different_modules_of_forms_in_one_wrapper_are_refused() -> None:
    made: Any = unflatten(torch.export.export(Nested().eval(), (X,)))
    other: Any = unflatten(torch.export.export(Sampler().eval(), (X,)))
    made.step = nn.Sequential(made.step, other.step)
    with pytest.raises(InputConstraintError, match="which of them is meant"):
        made(X)


@pytest.mark.parametrize("how", [torch.export.export, export_preserving])
def test_what_a_module_that_calls_itself_calls_can_be_wrapped(how: Any) -> None:
    eager: Any = Deep().eval()
    made: Any = unflatten(how(eager, (X,)))
    for model in (made, eager):
        model.step.work = Around(model.step.work, 2.0)
    torch.testing.assert_close(made(X), eager(X))
