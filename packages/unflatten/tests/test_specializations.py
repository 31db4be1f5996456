"""Modules of several specializations: the caller's code says which one each call is."""

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
from unflatten_zoo.judges import Around  # type: ignore[import-not-found]
from unflatten_zoo.models import calls  # type: ignore[import-not-found]

from lowerdeck.unflatten import (
    InputConstraintError,
    InterpreterModuleDispatcher,
    UnflattenError,
    export_preserving,
    unflatten,
)

X = torch.linspace(-1, 1, 8).view(2, 4)
EXPORTS: dict[str, Any] = {"plain": torch.export.export, "preserving": export_preserving}


@pytest.fixture(autouse=True)
def forget_compiled() -> None:
    # All modules of several specializations share one function, of which a compiler counts what
    # it made.
    torch._dynamo.reset()


@pytest.fixture(params=EXPORTS)
def sampler(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    eager = calls.Sampler().eval()
    return unflatten(EXPORTS[request.param](eager, (X,))), eager


@pytest.fixture
def preserved() -> tuple[Any, Any]:
    eager = calls.Sampler().eval()
    return unflatten(export_preserving(eager, (X,))), eager


def doubled(eager: Any) -> Any:
    """Return a copy of eager in which the result of the step is doubled."""
    changed = copy.deepcopy(eager)
    changed.step = Around(changed.step, 2.0)
    return changed


def test_one_module_with_one_specialization_for_each_different_call(
    sampler: tuple[Any, Any],
) -> None:
    module, eager = sampler
    assert isinstance(module.step, InterpreterModuleDispatcher)
    assert len(module.step.call_modules()) == 3
    assert len(module.other.call_modules()) == 2
    assert not isinstance(module.step.work, InterpreterModuleDispatcher)
    assert [name for name, _ in module.named_modules()] == [
        name for name, _ in eager.named_modules()
    ]


def test_each_specialization_is_a_module(sampler: tuple[Any, Any]) -> None:
    module, eager = sampler
    for one, t in zip(module.step.call_modules(), (0.5, 0.25, 0.1), strict=True):
        given = (X, t) if "t" in one.code.partition("\n")[0] else (X,)
        torch.testing.assert_close(one(*given), eager.step(X, t))


def test_a_specialization_is_held_to_its_constants(preserved: tuple[Any, Any]) -> None:
    module, _ = preserved
    first, second, _ = module.step.call_modules()
    with pytest.raises(InputConstraintError, match=r"0\.5.*found 0\.25"):
        first(X, 0.25)
    with pytest.raises(InputConstraintError, match=r"0\.25.*found 0\.5"):
        second(X, 0.5)


def test_a_call_alone_is_refused(sampler: tuple[Any, Any]) -> None:
    """Arguments do not choose: ``call_modules()[number]`` of the module does."""
    module, _ = sampler
    for args in ((X,), (X, 0.75), (X, 0.5)):
        with pytest.raises((InputConstraintError, TypeError)):
            module.step(*args)
    row = next(row for row in module.swappable() if row.path == "step")
    assert not row.callable_alone
    assert "call_modules()" in row.reason


def test_the_code_has_every_specialization(sampler: tuple[Any, Any]) -> None:
    module, _ = sampler
    functions = [line for line in module.step.code.splitlines() if line.startswith("def ")]
    assert len(functions) == 3
    shown = module.print_readable(print_output=False)
    assert shown.count("def ") >= 7
    compile(shown, "readable", "exec")


class Hidden(nn.Module):
    """Holds a module where ``modules()`` does not see it, and calls it as ``how`` does."""

    def __init__(self, inner: Any, how: Callable[..., Any]) -> None:
        super().__init__()
        self.held, self.how = [inner], how

    def forward(self, *args: Any) -> Any:
        return self.how(self.held[0], *args)


def plainly(inner: Any, *args: Any) -> Any:
    return inner(*args)


def twice(inner: Any, *args: Any) -> Any:
    return (inner(*args) + inner(*args)) / 2


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, fullgraph=True, backend="eager")


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "around": Around,
    "two around": lambda inner: Around(Around(inner)),
    "hidden": lambda inner: Hidden(inner, plainly),
    "partial": lambda inner: Hidden(partial(inner), plainly),
    "twice": lambda inner: Hidden(inner, twice),
    "compiled": compiled,
    "compiled around": lambda inner: compiled(Around(inner)),
    "around compiled": lambda inner: Around(compiled(inner)),
}


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_a_wrapper_lets_the_specialization_through(preserved: tuple[Any, Any], wrap: str) -> None:
    module, eager = preserved
    module.step = WRAPPERS[wrap](module.step)
    # Compilers warn of inputs that another module computed with gradients.
    with torch.set_grad_enabled("compiled" not in wrap):
        for x in (X, X * 2):
            torch.testing.assert_close(module(x), eager(x))


@pytest.mark.parametrize("fullgraph", [False, True])
def test_the_whole_is_compiled(preserved: tuple[Any, Any], fullgraph: bool) -> None:
    module, eager = preserved
    module.step = Around(Around(module.step), 2.0)
    subject: Any = torch.compile(module, fullgraph=fullgraph, backend="eager")
    with torch.no_grad(), ThreadPoolExecutor(1) as pool:
        wanted = doubled(eager)(X)
        torch.testing.assert_close(subject(X), wanted)
        torch.testing.assert_close(pool.submit(subject, X).result(), wanted)


@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")
@pytest.mark.parametrize("strict", [False, True])
def test_a_wrapped_module_is_exported_again(preserved: tuple[Any, Any], strict: bool) -> None:
    module, eager = preserved
    module.step = Around(Around(module.step), 2.0)
    again = torch.export.export(module, (X,), strict=strict)
    wanted = doubled(eager)(X)
    torch.testing.assert_close(again.module()(X), wanted)
    torch.testing.assert_close(unflatten(again)(X), wanted)


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, copy.copy, lambda module: pickle.loads(pickle.dumps(module))],
    ids=["deepcopy", "copy", "pickle"],
)
def test_copies_of_a_wrapped_module_run_their_specializations(
    preserved: tuple[Any, Any], copied: Any
) -> None:
    module, eager = preserved
    module.step = Around(module.step)
    torch.testing.assert_close(copied(module)(X), eager(X))
    stored = io.BytesIO()
    torch.save(module, stored)
    stored.seek(0)
    torch.testing.assert_close(torch.load(stored, weights_only=False)(X), eager(X))


def test_threads_run_the_specialization_that_each_calls(preserved: tuple[Any, Any]) -> None:
    module, eager = preserved
    module.step = Around(module.step)
    again: list[Tensor] = []

    def calls_again(_: nn.Module, args: Any, result: Tensor) -> None:
        if len(again) < 20 and torch.is_grad_enabled():
            with torch.no_grad():
                again.append(module(args[0]))

    module.other.register_forward_hook(calls_again)
    with ThreadPoolExecutor(8) as pool:
        inputs = [X * number for number in range(32)]
        for found, x in zip(pool.map(module, inputs), inputs, strict=True):
            torch.testing.assert_close(found, eager(x))
    assert len(again) >= 20


def test_a_failed_call_leaves_no_specialization_chosen(preserved: tuple[Any, Any]) -> None:
    module, eager = preserved
    step = module.step

    def fail(*_: Any) -> None:
        raise ValueError("on purpose")

    for register in (step.register_forward_pre_hook, step.register_forward_hook):
        handle = register(fail)
        with pytest.raises(ValueError, match="on purpose"):
            module(X)
        handle.remove()
        with pytest.raises((InputConstraintError, TypeError)):
            step(X)
        torch.testing.assert_close(module(X), eager(X))


def on_another_thread(inner: Any, *args: Any) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(inner, *args).result()


def recomputed(inner: Any, *args: Any) -> Any:
    return checkpoint(inner, *args, use_reentrant=False)


@pytest.mark.parametrize("how", [on_another_thread, recomputed])
def test_where_the_caller_is_not_known_the_call_is_refused(
    preserved: tuple[Any, Any], how: Any
) -> None:
    module, _ = preserved
    module.step = Hidden(module.step, how)
    with pytest.raises(InputConstraintError, match=r"thread|call_modules"):
        module(X.clone().requires_grad_()).sum().backward()


def test_a_specialization_of_another_module_is_not_taken(preserved: tuple[Any, Any]) -> None:
    module, _ = preserved
    module.step, module.other = module.other, module.step
    with pytest.raises((InputConstraintError, UnflattenError)):
        module(X)


def test_specializations_in_specializations_are_wrapped() -> None:
    eager = calls.Nested().eval()
    made: Any = unflatten(export_preserving(eager, (X,)))
    made.step.step = Around(made.step.step)
    torch.testing.assert_close(made(X), eager(X))
    made.step = Around(Around(made.step))
    torch.testing.assert_close(made(X), eager(X))


def test_a_symbolic_trace_follows_the_whole_and_is_refused_alone(sampler: tuple[Any, Any]) -> None:
    module, eager = sampler
    torch.testing.assert_close(torch.fx.symbolic_trace(module)(X), eager(X))
    with pytest.raises((InputConstraintError, TypeError)):
        torch.fx.symbolic_trace(module.step)


class Ignores(nn.Module):
    """Computes the same for every number that it is given."""

    def forward(self, x: Tensor, number: int) -> Tensor:
        return x.tanh() * 2


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.shared = nn.ModuleList(Ignores() for _ in range(3)), Ignores()

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = self.shared(layer(x, number), number)
        return x


def test_calls_of_one_code_are_one_specialization() -> None:
    module: Any = unflatten(export_preserving(Layers(), (X,)))
    torch.testing.assert_close(module(X), Layers()(X))
    assert not isinstance(module.shared, InterpreterModuleDispatcher)
    for number in range(3):
        torch.testing.assert_close(module.shared(X, number), X.tanh() * 2)
    with pytest.raises(InputConstraintError, match="found 3"):
        module.shared(X, 3)
    with pytest.raises(InputConstraintError, match="found 1"):
        module.layers[2](X, 1)
