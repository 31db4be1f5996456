"""Which form of a submodule a call is, where hooks or a wrapper are between caller and form.

Both know one ``forward`` alone, so that ``forward`` must learn which form is meant. The
caller's context tells it: each thread and each task has its own, and it ends with the call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch

_CHOSEN: ContextVar[Mapping[int, int]] = ContextVar("_CHOSEN")


def _call_in_form(
    module: torch.nn.Module, number: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Call ``module`` as torch does, hooks included, and let its ``forward`` run one form."""
    token = _CHOSEN.set({**_CHOSEN.get({}), id(module): number})
    try:
        return module(*args, **kwargs)
    finally:
        _CHOSEN.reset(token)


_disable: Any = torch.compiler.disable


def _call_around(
    module: torch.nn.Module,
    inside: Sequence[torch.nn.Module],
    number: int,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call ``module`` and let the modules ``inside`` of it run one form."""
    token = _CHOSEN.set({**_CHOSEN.get({}), **{id(inner): number for inner in inside}})
    try:
        return module(*args, **kwargs)
    finally:
        _CHOSEN.reset(token)


call_in_form: Callable[..., Any] = _disable(_call_in_form)
call_around: Callable[..., Any] = _disable(_call_around)
"""Uncompiled: a compiler would follow ``forward`` without the context, into another form."""


def forward_of(functions: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    """Return a ``forward`` that runs the chosen form; the first one where none is chosen."""
    first = functions[0]

    @functools.wraps(first)
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Non-strict export counts as compiling too, and runs this as it is.
        if torch.compiler.is_dynamo_compiling():
            return first(self, *args, **kwargs)
        chosen = _CHOSEN.get({})
        number = chosen.get(id(self), 0)
        if not number:
            return first(self, *args, **kwargs)
        # The choice is for this call alone, not for those that the form makes.
        token = _CHOSEN.set({**chosen, id(self): 0})
        try:
            return functions[number](self, *args, **kwargs)
        finally:
            _CHOSEN.reset(token)

    return forward
