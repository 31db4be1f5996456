"""What a caller tells the generated module that it means, beside the arguments and the result.

Which of its forms the call is, the values that it reads and that are no arguments, and those that
others read and that are no results. Wrappers, hooks and the module's own ``__call__`` know one
``forward`` with eager's arguments alone, so that all this waits for it beside them: each thread
has its own, and it ends with the call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from lowerdeck.unflatten._torch_private import running_backward
from lowerdeck.unflatten.calls.carrying import read_by_others, reads_of_others
from lowerdeck.unflatten.errors import UnflattenError


class Told:
    """What is told of one call.

    Args:
        key: The key of the form that it is.
        given: What it reads beside its arguments.

    Attributes:
        back: What others read beside its result, once it ran.
        is_taken: Whether a module took what was told.
        backward: The backward pass in which it was told.
    """

    __slots__ = ("back", "backward", "given", "is_taken", "key")

    def __init__(self, key: str, given: tuple[Any, ...] = ()) -> None:
        self.key: str = key
        self.given: tuple[Any, ...] = given
        self.back: tuple[Any, ...] | None = None
        self.is_taken: bool = False
        self.backward: int = running_backward()

    def is_meant(self, keys: Sequence[str]) -> bool:
        """Return whether this may be told to the module that now runs, whose forms are ``keys``.

        What a backward pass computes again is a call of before, of which nothing is known.
        """
        return self.key in keys and self.backward == running_backward()


class _Channel(threading.local):
    # Not a context variable: compilers cannot follow these, and would run another form. They
    # write what a ``Told`` gets back, and not what this would. Both attributes are there from the
    # beginning in each thread: what compilers note is whether they are, before tracing sets them.
    def __init__(self) -> None:
        self.told: Told | None = None
        self.entered: Told | None = None


CHANNEL = _Channel()
"""``told`` waits for the module that it means; ``entered`` for the function that runs the form."""


def call_told(module: Callable[..., Any], told: Told, /, *args: Any, **kwargs: Any) -> Any:
    """Call ``module`` and let a module in it that has the form of this key run that."""
    before = CHANNEL.told
    try:
        CHANNEL.told = told
        return module(*args, **kwargs)
    finally:
        CHANNEL.told = before


def carrying(
    module: Callable[..., Any], key: str, given: tuple[Any, ...], names: Sequence[str], needs: int
) -> Callable[..., Any]:
    """Return what calls ``module`` with the values ``given`` beside its arguments.

    Args:
        module: What is where a generated module was, or that module.
        key: The key of the form that the call is.
        given: The values; a module that is not generated computes them itself.
        names: What others read that is no result of the call; where there are any, a pair is
            returned, of the result and of them.
        needs: How many of the values other modules compute, so that only a generated one has them.
    """
    return partial(_call_carrying, module, key, given, names, needs)


def _call_carrying(
    module: Callable[..., Any],
    key: str,
    given: tuple[Any, ...],
    names: Sequence[str],
    needs: int,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    told = Told(key, given)
    result = call_told(module, told, *args, **kwargs)
    if needs > sum(isinstance(value, Missing) for value in given) and not told.is_taken:
        raise UnflattenError(
            f"A {type(module).__name__} stands for a module that {reads_of_others(needs)}; found "
            "no way to give it these. Replace the modules that compute them too, where it gets "
            "them from these, or export the model with it in that place."
        )
    if not names:
        return result
    if told.back is None:
        why = (
            f"A {type(module).__name__} stands for a module in which {', '.join(names)} were "
            "computed, which other modules read without being given them; found no way to get "
            "them from it. Replace those modules too, or none of them."
        )
        return result, tuple(Missing(why) for _ in names)
    return result, told.back


class Missing:
    """Stands for a value that a module in the place of a generated one did not hand over.

    Whoever reads it is told so; modules that were replaced too do not read it.

    Args:
        why: The error's text.
    """

    def __init__(self, why: str) -> None:
        self.why: str = why

    def __torch_function__(self, *_: Any, **__: Any) -> Any:
        raise UnflattenError(self.why)

    __getattr__ = __torch_function__


def take_told(taken: int, returned: int) -> Told:
    """Return what the caller of the running module told.

    Args:
        taken: How many values it must give.
        returned: How many values it gets beside the result.

    Raises:
        UnflattenError: The module was called alone.
    """
    told, CHANNEL.entered = CHANNEL.entered, None
    if told is None or len(told.given) != taken:
        why = reads_of_others(taken) if taken else read_by_others(returned)
        raise UnflattenError(
            f"This module {why}, and was called alone. Call it as a part of the whole module."
        )
    for value in told.given:
        if isinstance(value, Missing):
            raise UnflattenError(value.why)
    told.is_taken = True
    return told
