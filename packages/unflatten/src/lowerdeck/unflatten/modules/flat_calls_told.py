"""A module of flat values among modules that take eager's arguments, called with some of these."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

from lowerdeck.unflatten._torch_private import CALL_MODULE
from lowerdeck.unflatten.calls import chosen_forms
from lowerdeck.unflatten.calls.carrying import PRIVATE
from lowerdeck.unflatten.calls.former_calls import told_flat
from lowerdeck.unflatten.errors import InputStructureError

_BEFORE = {CALL_MODULE.co_filename, chosen_forms.__file__}
"""What runs before the code of a module does."""


def call_flat(self: torch.nn.Module, *values: Any, **named: Any) -> Any:
    """Call a module that takes flat values by position.

    Raises:
        InputStructureError: It was given more or fewer ones, or some by name.
    """
    try:
        return torch.nn.Module.__call__(self, *values, **named)
    except TypeError as error:
        body = self.__dict__[PRIVATE]
        count = len(body.graph.find_nodes(op="placeholder"))
        if (len(values) == count and not named) or not _is_before(error.__traceback__):
            raise
        by_name = f" and {', '.join(map(repr, named))} by name" if named else ""
        given = f"{len(values)} {'value' if len(values) == 1 else 'values'}{by_name}"
        raise InputStructureError(
            f"A {body.type_name or type(self).__name__} was called with {given}. The program does "
            f"not have its signature, so that it does not take eager's arguments. "
            f"{told_flat(body)} Pass {count}, by position."
        ) from error


def _is_before(traceback: TracebackType | None) -> bool:
    """Return whether an error was raised before the code of the module that was called."""
    traceback = traceback.tb_next if traceback is not None else None
    if traceback is None:
        return False
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename not in _BEFORE:
            return False
        traceback = traceback.tb_next
    return True
