"""A module called with more or fewer arguments than were recorded, or by other names.

Python refuses such a call itself, before any code of ours runs, so that calls that fit cost
nothing. Its error says neither that eager's module may take them nor what can be done.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

import torch

from lowerdeck.unflatten._torch_private import CALL_MODULE
from lowerdeck.unflatten.calls import chosen_forms
from lowerdeck.unflatten.calls.carrying import PRIVATE
from lowerdeck.unflatten.calls.former_calls import told_flat, told_values
from lowerdeck.unflatten.calls.recorded_calls import leaf_name
from lowerdeck.unflatten.calls.signature import CallSignature
from lowerdeck.unflatten.errors import InputStructureError

_BEFORE = {CALL_MODULE.co_filename, chosen_forms.__file__}
"""What runs before the code of a module does."""


def say_what_was_recorded(error: BaseException) -> None:
    """Raise an error of ours if ``error`` is Python's of what a generated module was given.

    Args:
        error: What the code of a caller meets.

    Raises:
        InputStructureError: The module was given more or fewer arguments, or by other names.
    """
    if type(error) is not TypeError:
        return
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    # What ends within the code of a module is its own affair.
    if traceback is None or traceback.tb_frame.f_code.co_filename not in _BEFORE:
        return
    held = traceback.tb_frame.f_locals
    module, args, kwargs = held.get("self"), held.get("args"), held.get("kwargs")
    if not isinstance(module, torch.nn.Module) or args is None or kwargs is None:
        return
    first = module.__dict__.get(PRIVATE)
    if first is None:
        return
    refused = refusal(module, (first, *first.others)[held.get("number", 0)], args, kwargs)
    if refused is not None:
        raise refused from error


def is_before(traceback: TracebackType | None) -> bool:
    """Return whether an error was raised before the code of the module that was called."""
    traceback = traceback.tb_next if traceback is not None else None
    if traceback is None:
        return False
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename not in _BEFORE:
            return False
        traceback = traceback.tb_next
    return True


def refusal(
    module: torch.nn.Module, form: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> InputStructureError | None:
    """Return the error for a call of ``module`` with such arguments, None where they fit.

    Args:
        module: What was called.
        form: The form that the call is.
        args: The positional arguments.
        kwargs: The keyword arguments.
    """
    signature: CallSignature | None = form.signature
    name = form.type_name or type(module).__name__
    by_name = f"{', '.join(map(repr, kwargs))} by name" if kwargs else ""
    if signature is None or signature.flat:
        count = len(form.graph.find_nodes(op="placeholder"))
        if len(args) == count and not kwargs:
            return None
        given = f"{len(args)} {'value' if len(args) == 1 else 'values'}"
        return InputStructureError(
            f"A {name} was called with {given}{' and ' * bool(kwargs)}{by_name}. The program does "
            f"not have its signature, so that it does not take eager's arguments. "
            f"{told_flat(form)} Pass {count}, by position."
        )
    hidden = {variable for _, variable in signature.others}
    names = [each for each in signature.names if each not in hidden]
    others = [key for key, _ in signature.others]
    passed = [*names[: len(args)], *kwargs]
    if signature.adapts or (
        len(args) <= len(names) and sorted(passed) == sorted([*names, *others])
    ):
        return None
    missing = [each for each in (*names, *others) if each not in passed]
    known = {*names[len(args) :], *others}
    more = [
        *(f"{len(args) - len(names)} more by position" for _ in range(len(args) > len(names))),
        *(repr(key) for key in kwargs if key not in known),
    ]
    wrong = [f"without {', '.join(map(repr, missing))}"] if missing else []
    wrong += [f"with {' and '.join(more)} too"] if more else []
    call = form.recorded[0] if form.recorded else ()
    values = told_values([leaf_name(form, index) for index in range(len(call))], call)
    return InputStructureError(
        f"A {name} was called {' and '.join(wrong)}. The program holds what it computes of what "
        f"was recorded ({values}), and no defaults of eager's. Pass these arguments, put an eager "
        "module in its place, or export a model that calls it so."
    )
