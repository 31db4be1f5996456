"""Call each module of random models alone, and compare with what ``swappable`` says of it."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from random_changes import called_in_branches, loose  # type: ignore[import-not-found]
from random_comparison import dynamic_shapes  # type: ignore[import-not-found]
from random_models import Case, random_case  # type: ignore[import-not-found]
from torch import Tensor, nn
from torch.export import ExportedProgram, export
from torch.utils import _pytree as pytree
from unflatten_comparison import assert_equal  # type: ignore[import-not-found]

from lowerdeck.unflatten import (
    Swap,
    UnflattenedModule,
    UnflattenError,
    export_preserving,
    unflatten,
)
from lowerdeck.unflatten.calls.carrying import UNCALLED

FORMS = ("plain all", "preserving", "strict preserving", "decomposed preserving", "plain")
"""How a model is exported and unflattened."""

IN_DOUBT = ("of which", "called alone it would not change its argument")
"""Reasons of modules that are not refused in each call: some forms, and what is lost, are told."""


@dataclass
class Recorded:
    """One call of a module while the whole model runs.

    Attributes:
        given: Its arguments and keyword arguments.
        state: The state of the module before.
        grad: Whether gradients are recorded.
        autocast: Whether autocast is on.
        rng: The state of the generator of random numbers.
        result: What it returned.
        left: The arguments after the call.
        state_left: The state after the call.
    """

    given: Any
    state: Mapping[str, Tensor]
    grad: bool
    autocast: bool
    rng: Tensor
    result: Any = None
    left: Any = None
    state_left: Mapping[str, Tensor] = field(default_factory=dict)


def check_seed(seed: int, cost: int = 20, form: str | None = None) -> Counter[str]:
    """Call each module of the model of ``seed`` alone; return how many calls came out how.

    Args:
        seed: What the model is made of.
        cost: How many calls the model may have.
        form: One of ``FORMS``; by the seed if there is none.

    Raises:
        AssertionError: What a call gives, or that it is refused, is not what the table says.
    """
    case = random_case(seed, cost=cost)
    form = form or FORMS[seed % len(FORMS)]
    program = _exported(case, form)
    if program is None:
        return Counter({"no export": 1})
    module = unflatten(program, preserve="all" if form == "plain all" else None)
    numbers = range(2 if case.dynamic else 1)
    calls = [(number, case.arguments(number)) for number in numbers]
    found: Counter[str] = Counter()
    for number, (args, kwargs) in calls:
        as_eager, flat = (
            _recorded(subject, number, copy.deepcopy((args, kwargs)))
            for subject in (case.model, module)
        )
        told = loose(case.model).keys() - called_in_branches(case.model)
        recorded = {path: made for path, made in as_eager.items() if path in told}
        taken = {row.path: flat.get(row.path, []) for row in module.swappable() if is_flat(row)}
        found += check_table(module, {**recorded, **taken})
    return found


def is_flat(row: Swap) -> bool:
    """Return whether a module is called alone not as eager's, but with what it reads."""
    return "flat values" in row.reason


def _recorded(model: nn.Module, seed: int, given: Any) -> dict[str, list[Recorded]]:
    torch.manual_seed(seed)
    args, kwargs = given
    return record_calls(copy.deepcopy(model), args, kwargs)


def _exported(case: Case, form: str) -> ExportedProgram | None:
    args, kwargs = case.arguments()
    how = export if form.startswith("plain") else export_preserving
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            program: ExportedProgram = how(
                copy.deepcopy(case.model),
                args,
                kwargs,
                dynamic_shapes=dynamic_shapes(case),
                strict=form.startswith("strict"),
            )
            return program.run_decompositions() if form.startswith("decomposed") else program
        except Exception:
            # torch.export fails with errors of many types; nox -s changes counts them.
            return None


def record_calls(model: nn.Module, args: Any, kwargs: Any) -> dict[str, list[Recorded]]:
    """Return the calls that each module under ``model`` gets while that runs."""
    found: dict[str, list[Recorded]] = {}
    open_calls: list[Recorded] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        modes = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        state = torch.get_rng_state()
        open_calls.append(Recorded(_copied((args, kwargs)), _state(module), *modes, state))

    table = model.swappable() if isinstance(model, UnflattenedModule) else ()
    # A hook there is refused: the program has not all calls of it.
    without = {row.path for row in table if _is_uncalled(row.reason)}
    with ExitStack() as stack:
        for path, child in model.named_modules():
            if not path or path in without:
                continue

            def after(
                module: nn.Module, args: Any, kwargs: Any, result: Any, path: str = path
            ) -> None:
                made = open_calls.pop()
                made.result, made.left = _copied((result, (args, kwargs)))
                made.state_left = _state(module)
                found.setdefault(path, []).append(made)

            for handle in (
                child.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
                child.register_forward_hook(after, with_kwargs=True),
            ):
                stack.callback(handle.remove)
        model(*args, **kwargs)
    return found


def _is_uncalled(reason: str) -> bool:
    return any(why.startswith(UNCALLED) for why in reason.split("; "))


def check_table(
    module: UnflattenedModule,
    recorded: Mapping[str, list[Recorded]],
    tolerance: float | None = None,
) -> Counter[str]:
    """Make each call of ``recorded`` alone; return how many are right, and how many refused.

    Raises:
        AssertionError: One is not what the table of ``module`` says.
    """
    found: Counter[str] = Counter()
    for row in module.swappable():
        for number, call in enumerate(recorded.get(row.path, ())):
            where = f"call {number} of {row.path!r} ({row.callable_alone=}, {row.reason!r})"
            child = copy.deepcopy(module).get_submodule(row.path)
            try:
                given, result = _called(child, call)
            except UnflattenError as error:
                if row.callable_alone:
                    raise AssertionError(where) from error
                found["refused"] += 1
                continue
            assert row.callable_alone or any(why in row.reason for why in IN_DOUBT), where
            try:
                assert_equal(result, call.result, tolerance)
                if row.callable_alone:
                    assert_equal(given, call.left, tolerance)
                    after = {name: call.state_left[name] for name in _state(child)}
                    assert_equal(_state(child), after, tolerance)
            except AssertionError as error:
                raise AssertionError(f"{where}: {error}") from error
            found["right" if row.callable_alone else "in doubt"] += 1
    return found


def _called(child: nn.Module, call: Recorded) -> tuple[Any, Any]:
    """Return the arguments after a call of ``child`` alone, and its result."""
    with torch.no_grad():
        for name, value in _tensors(child).items():
            if name in call.state:
                value.copy_(call.state[name])
    args, kwargs = given = _copied(call.given)
    torch.set_rng_state(call.rng)
    with torch.set_grad_enabled(call.grad), torch.autocast("cpu", enabled=call.autocast):
        result = child(*args, **kwargs)
    return given, result


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _state(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in _tensors(module).items()}


def _copied(value: Any) -> Any:
    """Return a copy in which what was one tensor is one still."""
    made: dict[int, Tensor] = {}

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return made.setdefault(id(leaf), leaf.detach().clone())

    return pytree.tree_map(one, value)
