"""Compare an unflattened module with the eager module that it came from."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram, export
from torch.utils import _pytree as pytree

from lowerdeck.unflatten import UnflattenedModule, unflatten

FORMS = ("non-strict", "non-strict decomposed", "strict", "strict decomposed")
PLAIN = ("non-strict", "strict")


def programs(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    forms: Sequence[str] = FORMS,
    **options: Any,
) -> dict[str, ExportedProgram]:
    """Return the program in every form that users have: strict or not, decomposed or not."""
    found: dict[str, ExportedProgram] = {}
    for strict in (False, True):
        name = "strict" if strict else "non-strict"
        if not any(form.startswith(name) for form in forms):
            continue
        subject = copy.deepcopy(model)
        with warnings.catch_warnings():
            # torch's own passes warn of torch's own deprecations.
            warnings.simplefilter("ignore")
            program = export(subject, tuple(args), dict(kwargs or {}), strict=strict, **options)
            found[name] = program
            if f"{name} decomposed" in forms:
                found[f"{name} decomposed"] = program.run_decompositions()
    return found


def check(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    calls: int = 3,
    forms: Sequence[str] = FORMS,
    names: bool = True,
    **options: Any,
) -> dict[str, UnflattenedModule]:
    """Assert that unflattening each form gives eager's values, mutations, state and names."""
    made = {}
    for form, program in programs(model, args, kwargs, forms=forms, **options).items():
        subject = unflatten(program)
        compare(copy.deepcopy(model), subject, args, kwargs, calls=calls, names=names)
        made[form] = subject
    return made


def compare(
    eager: nn.Module,
    subject: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    calls: int = 3,
    names: bool = True,
) -> None:
    """Assert equal results, equal mutations of inputs and state, and equal names."""
    for _ in range(calls):
        mine = copy.deepcopy((tuple(args), dict(kwargs or {})))
        theirs = copy.deepcopy((tuple(args), dict(kwargs or {})))
        torch.manual_seed(1)
        expected = eager(*theirs[0], **theirs[1])
        torch.manual_seed(1)
        found = subject(*mine[0], **mine[1])
        assert_equal(found, expected)
        assert_equal(mine, theirs)
    state, expected_state = subject.state_dict(), eager.state_dict()
    assert list(state) == list(expected_state)
    for name, value in expected_state.items():
        torch.testing.assert_close(state[name], value, msg=f"{name} differs")
    expected_buffers = dict(eager.named_buffers(remove_duplicate=False))
    for name, value in subject.named_buffers():
        torch.testing.assert_close(value, expected_buffers[name])
    if names:
        assert modules_of(subject) == modules_of(eager)


def modules_of(module: nn.Module) -> list[str]:
    """Return all module names, those of shared modules too."""
    return [name for name, _ in module.named_modules(remove_duplicate=False)]


def assert_equal(found: Any, expected: Any, tolerance: float | None = None) -> None:
    """Assert equal structure and equal leaves, within a tolerance if it is given."""
    leaves, spec = pytree.tree_flatten(found)
    expected_leaves, expected_spec = pytree.tree_flatten(expected)
    assert spec == expected_spec
    for leaf, expected_leaf in zip(leaves, expected_leaves, strict=True):
        if isinstance(expected_leaf, torch.Tensor):
            torch.testing.assert_close(leaf, expected_leaf, rtol=tolerance, atol=tolerance)
        else:
            assert leaf == expected_leaf
