"""Call each module of random models alone, and compare with what ``swappable`` says of it."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from random_changes import (  # type: ignore[import-not-found]
    called_in_branches,
    exported,
    form_of,
    is_decomposed,
    loose,
)
from random_models import random_case  # type: ignore[import-not-found]
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from unflatten_comparison import assert_equal  # type: ignore[import-not-found]

from lowerdeck.unflatten import (
    Swap,
    UnflattenedModule,
    UnflattenError,
    unflatten,
)
from lowerdeck.unflatten.calls.carrying import UNCALLED

FORMS = (
    "plain all",
    "preserving",
    "strict preserving",
    "decomposed preserving",
    "plain",
    "functional preserving",
    "decomposed loaded preserving",
)
"""How a model is exported and unflattened."""

IN_DOUBT = (
    "of which",
    "called alone it would not change its argument",
    "decomposing lost what eager's takes and returns",
)
"""Reasons of modules that are not refused in each call: some forms, and what is lost, are told."""

PERHAPS = "may compute or write something without gradients"
"""The reason of modules that may run otherwise than eager's, where the program does not tell."""


@dataclass
class Recorded:
    """One call of a module while the whole model runs.

    Attributes:
        given: Its arguments and keyword arguments.
        state: The state of the whole model before: one module may read through another name.
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
        form: One of ``FORMS``, and "odd" before it for odd models; by the seed if there is none.

    Raises:
        AssertionError: What a call gives, or that it is refused, is not what the table says.
    """
    form = form or form_of(seed, FORMS)
    case = random_case(seed, cost=cost, odd="odd" in form)
    try:
        program = exported(case, form)
    except Exception:
        # torch.export fails with errors of many types; nox -s changes counts them.
        return Counter({"no export": 1})
    module = unflatten(program, preserve="all" if "plain all" in form else None)
    numbers = range(2 if case.dynamic else 1)
    calls = [(number, case.arguments(number)) for number in numbers]
    found: Counter[str] = Counter()
    for number, (args, kwargs) in calls:
        as_eager = _recorded(case.model, number, copy.deepcopy((args, kwargs)))
        try:
            flat = _recorded(module, number, copy.deepcopy((args, kwargs)))
        except UnflattenError as error:
            # One of several names of a module is called where no hook is allowed.
            if "A hook waits" not in str(error):
                raise
            flat = {}
        told = loose(case.model).keys() - called_in_branches(case.model)
        recorded = {path: made for path, made in as_eager.items() if path in told}
        taken = {row.path: flat.get(row.path, []) for row in module.swappable() if is_flat(row)}
        # Decomposing drops the write of what nobody reads again.
        found += check_table(module, {**recorded, **taken}, writes=not is_decomposed(form))
    return found


def is_flat(row: Swap) -> bool:
    """Return whether a module is called alone not as eager's, but with what it reads."""
    return "flat values" in row.reason


def _recorded(model: nn.Module, seed: int, given: Any) -> dict[str, list[Recorded]]:
    torch.manual_seed(seed)
    args, kwargs = given
    return record_calls(copy.deepcopy(model), args, kwargs)


def record_calls(model: nn.Module, args: Any, kwargs: Any) -> dict[str, list[Recorded]]:
    """Return the calls that each module under ``model`` gets while that runs."""
    found: dict[str, list[Recorded]] = {}
    open_calls: list[tuple[Recorded, Any]] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        modes = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        state = torch.get_rng_state()
        made = Recorded(_copied((args, kwargs)), _state(model), *modes, state)
        # Hooks of the model's own may change what the call gets.
        open_calls.append((made, (args, kwargs)))

    paths = {path for path, _ in model.named_modules() if path}
    if isinstance(model, UnflattenedModule):
        # Of others eager's calls are made; and a hook is refused where not all calls are there.
        rows = model.swappable()
        paths &= {row.path for row in rows if is_flat(row) and not _lacks_calls(row.reason)}
    with ExitStack() as stack:
        for path, child in model.named_modules():
            if path not in paths:
                continue

            def after(
                module: nn.Module, args: Any, kwargs: Any, result: Any, path: str = path
            ) -> None:
                made, given = open_calls.pop()
                made.result, made.left = _copied((result, given))
                made.state_left = _state(module)
                found.setdefault(path, []).append(made)

            for handle in (
                child.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
                child.register_forward_hook(after, with_kwargs=True),
            ):
                stack.callback(handle.remove)
        model(*args, **kwargs)
    return found


def _lacks_calls(reason: str) -> bool:
    return any(why in reason for why in (*UNCALLED, PERHAPS, "has no call in this program"))


def check_table(
    module: UnflattenedModule,
    recorded: Mapping[str, list[Recorded]],
    tolerance: float | None = None,
    *,
    writes: bool = True,
) -> Counter[str]:
    """Make each call of ``recorded`` alone; return how many are right, and how many refused.

    Args:
        module: What has the table.
        recorded: The calls of each module.
        tolerance: How far numbers may be off.
        writes: Whether the program has each write of an argument.

    Raises:
        AssertionError: One is not what the table of ``module`` says.
    """
    found: Counter[str] = Counter()
    for row in module.swappable():
        for number, call in enumerate(recorded.get(row.path, ())):
            where = f"call {number} of {row.path!r} ({row.callable_alone=}, {row.reason!r})"
            root = copy.deepcopy(module)
            child = root.get_submodule(row.path)
            try:
                given, result = _called(root, child, call)
            except UnflattenError as error:
                if row.callable_alone:
                    raise AssertionError(where) from error
                found["refused"] += 1
                continue
            if PERHAPS in row.reason:
                found["perhaps"] += 1
                continue
            assert row.callable_alone or any(why in row.reason for why in IN_DOUBT), where
            try:
                assert_equal(result, call.result, tolerance)
                if row.callable_alone:
                    if writes:
                        assert_equal(given, call.left, tolerance)
                    after = {name: call.state_left[name] for name in _state(child)}
                    assert_equal(_state(child), after, tolerance)
            except AssertionError as error:
                raise AssertionError(f"{where}: {error}") from error
            found["right" if row.callable_alone else "in doubt"] += 1
    return found


def _called(root: nn.Module, child: nn.Module, call: Recorded) -> tuple[Any, Any]:
    """Return the arguments after a call of ``child`` of ``root`` alone, and its result."""
    with torch.no_grad():
        for name, value in _tensors(root).items():
            if name in call.state:
                value.copy_(call.state[name])
    args, kwargs = given = _copied(call.given)
    torch.set_rng_state(call.rng)
    with torch.set_grad_enabled(call.grad), torch.autocast("cpu", enabled=call.autocast):
        result = child(*args, **kwargs)
    return given, result


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    both = module.named_parameters, module.named_buffers
    return {name: held for named in both for name, held in named(remove_duplicate=False)}


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
