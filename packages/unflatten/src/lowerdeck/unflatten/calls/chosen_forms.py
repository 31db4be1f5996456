"""Which form of a submodule a call is, whatever is between the caller and the module.

The caller says it, by the form's key, and the module that has a form of that key runs it. A
wrapper between them, hooks and the module's own ``__call__`` know one ``forward`` alone, so that
the key waits for it beside the arguments: each thread has its own, and it ends with the call.
A ``forward`` that was told nothing asks its arguments, and never guesses.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from lowerdeck.unflatten._torch_private import runs_more_than_forward
from lowerdeck.unflatten.calls.carrying import PRIVATE, Generated
from lowerdeck.unflatten.calls.recorded_calls import told_by_arguments

Function = Callable[..., Any]


class _Chosen(threading.local):
    # Not a context variable: compilers cannot follow these, and would run another form.
    key: str | None = None


_CHOSEN = _Chosen()


def form_of(
    caller: torch.nn.Module, module: Function, path: str, number: int
) -> Callable[..., Any]:
    """Return what runs a form of a call.

    Args:
        caller: The module whose code makes the call.
        module: What is where the forms were: they themselves, what was put around them, which
            lets them run this form however deep in it they are, or another module, which has one
            ``forward`` for all.
        path: The caller's name for it.
        number: Which of its forms the call is.
    """
    keys: Sequence[str] = caller.__dict__[PRIVATE].keys_of.get(path, ())
    # A container of ours has no forms.
    body = module.__dict__.get(PRIVATE) if isinstance(module, Generated) else None
    own: Sequence[str] = body.keys if body is not None else ()
    if not keys:
        # A graph that somebody wrote means the module that is there.
        keys = own
    if keys and own == keys:
        found: Callable[..., Any] = getattr(module, f"_call_{number}")
        return found
    return partial(_call_in_form, module, keys[number]) if number < len(keys) else module


def _call_in_form(module: Function, key: str, *args: Any, **kwargs: Any) -> Any:
    """Call ``module`` and let a module in it that has the form of this key run that."""
    before = _CHOSEN.key
    _CHOSEN.key = key
    try:
        return module(*args, **kwargs)
    finally:
        _CHOSEN.key = before


def method_of(number: int, function: Function) -> Function:
    """Return the method by which callers call a form."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if runs_more_than_forward(self):
            return _call_in_form(self, self.__dict__[PRIVATE].keys[number], *args, **kwargs)
        return function(self, *args, **kwargs)

    return call


def forward_of(functions: Sequence[Function]) -> Function:
    """Return a ``forward`` that runs the form that was chosen, or that its arguments tell."""

    @functools.wraps(functions[0])
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        keys: Sequence[str] = self.__dict__[PRIVATE].keys
        key = _CHOSEN.key
        number = keys.index(key) if key in keys else told_by_arguments(self, args, kwargs)
        # The choice is for this call alone, not for those that the form makes.
        _CHOSEN.key = None
        try:
            return functions[number](self, *args, **kwargs)
        finally:
            _CHOSEN.key = key

    return forward
