"""Which form of a submodule a call is, whatever is between the caller and the module.

The caller says it, by the form's key, and the module that has a form of that key runs it. A
``forward`` that was told nothing asks its arguments, and never guesses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from lowerdeck.unflatten._torch_private import runs_more_than_forward
from lowerdeck.unflatten.calls.carrying import PRIVATE, Generated
from lowerdeck.unflatten.calls.channel import CHANNEL, Told, call_told, carrying
from lowerdeck.unflatten.calls.recorded_calls import told_by_arguments

Function = Callable[..., Any]


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
    keys, own = _keys_of(caller, path), _own_keys(module)
    if not keys:
        # A graph that somebody wrote means the module that is there.
        keys = own
    if keys and own == keys:
        found: Callable[..., Any] = getattr(module, f"_call_{number}")
        return found
    return partial(_call_in_form, module, keys[number]) if number < len(keys) else module


def carrying_form(
    caller: torch.nn.Module,
    module: Function,
    path: str,
    number: int,
    given: tuple[Any, ...],
    names: Sequence[str],
    needs: int = 0,
) -> Callable[..., Any]:
    """Return what runs a form of a call that reads more than its arguments, or is read so.

    Args:
        caller: The module whose code makes the call.
        module: What is where the module was.
        path: The caller's name for it.
        number: Which of its forms the call is.
        given: The values that it reads.
        names: What others read that is no result; where there are any, a pair is returned.
        needs: How many of the values only a generated module gets.
    """
    keys = _keys_of(caller, path) or _own_keys(module)
    return carrying(module, keys[number] if number < len(keys) else "", given, names, needs)


def _keys_of(caller: torch.nn.Module, path: str) -> Sequence[str]:
    found: Sequence[str] = caller.__dict__[PRIVATE].keys_of.get(path, ())
    return found


def _own_keys(module: Function) -> Sequence[str]:
    # A container of ours has no forms.
    body = module.__dict__.get(PRIVATE) if isinstance(module, Generated) else None
    found: Sequence[str] = body.keys if body is not None else ()
    return found


def _call_in_form(module: Function, key: str, /, *args: Any, **kwargs: Any) -> Any:
    """Call ``module`` and let a module in it that has the form of this key run that."""
    return call_told(module, Told(key), *args, **kwargs)


def method_of(number: int, function: Function) -> Function:
    """Return the method by which callers call a form."""

    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if runs_more_than_forward(self):
            return _call_in_form(self, self.__dict__[PRIVATE].keys[number], *args, **kwargs)
        return function(self, *args, **kwargs)

    return call


def forward_of(functions: Sequence[Function]) -> Function:
    """Return a ``forward`` that runs the form that was told, or that its arguments tell."""

    @functools.wraps(functions[0])
    def forward(self: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        keys: Sequence[str] = self.__dict__[PRIVATE].keys
        told = CHANNEL.told
        mine = told if told is not None and told.is_meant(keys) else None
        if mine is not None:
            number = keys.index(mine.key)
        else:
            number = told_by_arguments(self, args, kwargs) if len(functions) > 1 else 0
        # What was told is for this call alone, not for those that the form makes.
        try:
            CHANNEL.told, CHANNEL.entered = None, mine
            return functions[number](self, *args, **kwargs)
        finally:
            CHANNEL.told, CHANNEL.entered = told, None

    return forward
