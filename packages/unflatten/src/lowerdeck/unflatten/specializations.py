"""Run calls: check changed children and select specializations.

Wrappers, hooks and a module's own ``__call__`` pass only eager's arguments. The rest is passed in
thread-local state: whether calls are checked, the selected specialization, and extra inputs and
outputs.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch

from lowerdeck.torch_base import pytree
from lowerdeck.unflatten._torch_private import calls_are_observed
from lowerdeck.unflatten.call_signature import PENDING, describe_spec
from lowerdeck.unflatten.contract import RecordedCall, check, describe, raise_for_result
from lowerdeck.unflatten.errors import InputConstraintError, UnflattenError
from lowerdeck.unflatten.metadata import CHECKS, FUNCTIONS, PRIVATE, UNCHANGED, full_name

Function = Callable[..., Any]

OUTSIDE, UNCHECKED, CHECKED, DIRECT = 0, 1, 2, 4


class _Run(threading.local):
    """Call state of this thread.

    Attributes:
        mode: ``OUTSIDE``: the next call of a generated module checks its arguments. ``CHECKED``:
            the caller is an unchanged generated module. ``UNCHECKED``: checks are off. ``DIRECT``:
            unchanged children are called through ``forward``.
        pending: The specialization that the caller selected.
    """

    # Not a context variable, which compilers cannot trace.
    def __init__(self) -> None:
        self.mode: int = OUTSIDE
        self.pending: PendingCall | None = None


RUN = _Run()


@dataclass(slots=True)
class Site:
    """Call sites of one child in a module's code.

    Attributes:
        name: The child's canonical name.
        out_spec: Structure of the result; None if the child has no signature.
    """

    name: str
    out_spec: pytree.TreeSpec | None = None
    calls: list[RecordedCall] = field(default_factory=list)


@dataclass(slots=True)
class PendingCall:
    """A caller's selected specialization, with extra inputs and outputs.

    Attributes:
        name: Canonical name of the module.
        number: Index of the specialization.
        extra_inputs: Inputs besides the arguments.
        extra_outputs: Outputs besides the result; set by the call.
        is_taken: Whether the module read this record; False if the module was replaced.
    """

    name: str
    number: int
    extra_inputs: tuple[Any, ...] = ()
    extra_outputs: tuple[Any, ...] | None = None
    is_taken: bool = False


def start(module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Check the arguments of a module that is not called by an unchanged parent, and run it."""
    function = getattr(type(module), FUNCTIONS)[0]
    return _run_checked(module, module.__dict__[PRIVATE], function, args, kwargs)


def _run_checked(
    module: torch.nn.Module,
    body: Any,
    function: Function,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    is_checked = module.__dict__.get(CHECKS, True)
    if is_checked:
        args, kwargs = body.check_arguments(module, args, kwargs)
    mode = CHECKED if is_checked else UNCHECKED
    RUN.mode = mode if calls_are_observed() else mode | DIRECT
    try:
        return function(module, *args, **kwargs)
    finally:
        RUN.mode = OUTSIDE


def is_strict_export() -> bool:
    """Return whether strict export traces the call: it would warn about mutations of ``RUN``."""
    return torch.compiler.is_exporting() and torch.compiler.is_dynamo_compiling()


def check_strict_export(module: torch.nn.Module, *leaves: Any) -> None:
    """Check the arguments of the outermost module while strict export traces it.

    Raises:
        InputConstraintError: An argument differs from the recorded one.
    """
    body: Any = module.__dict__[PRIVATE]
    if module.__dict__.get(CHECKS, True):
        mismatch = check(body.calls, leaves, any_float=body.is_moved)
        if mismatch is not None:
            raise InputConstraintError(
                f"argument {mismatch.position} of this module was recorded as "
                f"{mismatch.recorded}; found another value. Pass the recorded value."
            )


def enter(module: torch.nn.Module, child: Any, path: str) -> Function:
    """Return the callable of a child with a recorded signature: the child itself if unchanged.

    Args:
        child: The child or its replacement.
        path: The caller's name of the child.
    """
    site: Site | None = module.__dict__[PRIVATE].sites.get(path)
    # Not by code or name, which a module of another program may share.
    if site is None or UNCHANGED in child.__dict__:
        return child  # type: ignore[no-any-return]
    return partial(_call_changed, module, child, site, path)


def _call_changed(
    module: torch.nn.Module,
    child: Function,
    site: Site,
    path: str,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call a changed child, and check its result."""
    mode = RUN.mode
    if not mode & CHECKED or site.out_spec is None:
        return child(*args, **kwargs)
    RUN.mode = OUTSIDE
    try:
        result = child(*args, **kwargs)
    finally:
        RUN.mode = mode
    if isinstance(result, torch.fx.Proxy):
        return result
    leaves, structure = pytree.tree_flatten(result)
    name = full_name(module, path)
    if structure != site.out_spec:
        raise_for_result(describe_spec(structure), describe_spec(site.out_spec), name)
    arguments = pytree.tree_leaves((args, kwargs))
    any_float = module.__dict__[PRIVATE].is_moved
    mismatch = check(site.calls, arguments, leaves, any_float=any_float)
    if mismatch is not None:
        raise_for_result(describe(mismatch.value), mismatch.recorded, name)
    return result


def call_specialization(
    module: torch.nn.Module,
    child: Function,
    path: str,
    number: int,
    extras: tuple[Any, ...] = (),
    *,
    has_outputs: bool = False,
) -> Function:
    """Return a callable that runs one specialization of a child, through any wrappers.

    Args:
        child: The child or its replacement, which computes extra inputs itself.
        path: The caller's name of the child.
        number: Index of the specialization.
        has_outputs: The callable returns (result, extra outputs).
    """
    return partial(_call_pending, module, child, path, number, extras, has_outputs)


def _call_pending(
    module: torch.nn.Module,
    child: Function,
    path: str,
    number: int,
    extras: tuple[Any, ...],
    has_outputs: bool,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    site: Site | None = module.__dict__[PRIVATE].sites.get(path)
    pending = PendingCall(site.name if site is not None else path, number, extras)
    before = RUN.pending
    RUN.pending = pending
    try:
        result = enter(module, child, path)(*args, **kwargs)
    finally:
        RUN.pending = before
    if has_outputs and not pending.is_taken:
        raise UnflattenError(
            f"a {type(child).__name__} replaced {full_name(module, path)!r}, whose extra outputs "
            "other modules read. Export the model with the replacement in it."
        )
    return (result, pending.extra_outputs) if has_outputs else result


def dispatcher(functions: Sequence[Function]) -> Function:
    """Return a ``forward`` that dispatches to the caller's specialization."""

    @functools.wraps(functions[0])
    def forward(self: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        first: Any = self.__dict__[PRIVATE]
        pending = RUN.pending
        if pending is None or pending.name != first.name or pending.number >= len(functions):
            _raise_alone(first, len(functions))
        body, function = first.specializations[pending.number], functions[pending.number]
        pending.is_taken = True
        RUN.pending = None
        try:
            if body.signature is not None and body.signature.has_extras:
                kwargs[PENDING] = pending
            if RUN.mode or is_strict_export():
                return function(self, *args, **kwargs)
            bound = inspect.signature(function).bind(self, *args, **kwargs)
            return _run_checked(self, body, function, bound.args[1:], bound.kwargs)
        finally:
            RUN.pending = pending

    return forward


def _raise_alone(body: Any, count: int) -> NoReturn:
    name = body.type_name or "module"
    if count > 1:
        raise InputConstraintError(
            f"a {name} with {count} specializations was called without its caller, which selects "
            "one. Call call_modules()[number] of the module. Other threads and activation "
            "recomputation have no caller either."
        )
    raise UnflattenError(
        f"a {name} was called alone, but it exchanges values with other modules besides its "
        "arguments and its result. Call it as a part of the whole module."
    )
