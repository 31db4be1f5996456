"""A module of flat values among modules that take eager's arguments, called with some of these."""

from __future__ import annotations

from typing import Any

import torch

from lowerdeck.unflatten.calls.carrying import PRIVATE
from lowerdeck.unflatten.calls.other_arguments import is_before, refusal


def call_flat(self: torch.nn.Module, *values: Any, **named: Any) -> Any:
    """Call a module that takes flat values by position.

    Raises:
        InputStructureError: It was given more or fewer ones, or some by name.
    """
    try:
        return torch.nn.Module.__call__(self, *values, **named)
    except TypeError as error:
        refused = refusal(self, self.__dict__[PRIVATE], values, named)
        if refused is None or not is_before(error.__traceback__):
            raise
        raise refused from error
