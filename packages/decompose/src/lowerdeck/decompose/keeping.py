"""Checks of the operators that ``keep`` names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.fx import Node

from lowerdeck.decompose._torch_private import has_composite_kernel, is_preservable
from lowerdeck.decompose.errors import DecomposeError
from lowerdeck.torch_base import OpOverload, returns_alias, written_arguments

Keep = Iterable[OpOverload] | Mapping[OpOverload, Callable[[Node], bool] | None]
"""Operators that stay whole; in a mapping, each with which of its calls do, None for all."""


def can_keep(operator: object, *, some: bool = False) -> bool:
    """Return whether ``keep`` may name ``operator``.

    torch decomposes at once what may return its argument or a view of it, or writes.

    Args:
        operator: An overload of an operator; anything else cannot be kept.
        some: Whether some of its calls are to be kept, and others not.
    """
    if not isinstance(operator, OpOverload) or (some and _shares_memory(operator)):
        return False
    return not has_composite_kernel(operator) or is_preservable(operator)


def _shares_memory(operator: OpOverload) -> bool:
    return bool(written_arguments(operator)) or returns_alias(operator)


def check_kept(operator: Any, which: Any) -> None:
    """Refuse what ``keep`` cannot name.

    Args:
        operator: What it names.
        which: What it says of which calls are kept.

    Raises:
        DecomposeError: It is no operator, or torch cannot keep it, or not in part.
    """
    if not isinstance(operator, OpOverload):
        raise DecomposeError(
            f"keep names {operator!r}, which is no overload of an operator: give overloads, such "
            "as torch.ops.aten.linear.default"
        )
    if which is not None and not callable(which):
        raise DecomposeError(
            f"keep says {which!r} of {operator}, expected a function from a node to whether that "
            "call is kept, or None for all calls"
        )
    if not can_keep(operator, some=which is not None):
        raise DecomposeError(
            f"{operator} cannot be kept{'' if which is None else ' in part'}: it may return its "
            "argument or a view of it, or writes; leave it out of keep"
        )
