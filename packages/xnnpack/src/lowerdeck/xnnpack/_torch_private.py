"""Every use that this package makes of what is private in torch; each has a test of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._sympy.value_ranges import bound_sympy

__all__ = ["can_be"]


def can_be(size: object, number: int, ranges: Mapping[Any, Any]) -> bool:
    """Return whether a size may be as small as a number at run time, without a guard on it.

    Args:
        size: A number, or a symbol of an exported program.
        number: 0 or 1.
        ranges: The program's ``range_constraints``. What the symbol itself knows will not do: the
            tracer takes every dynamic size for 2 or more.
    """
    if not isinstance(size, torch.SymInt):
        return isinstance(size, int) and size == number
    return bool(bound_sympy(size.node.expr, dict(ranges)).lower <= number)
