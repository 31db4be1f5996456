"""Checks of the operators that ``keep`` names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.fx import Node

from lowerdeck.decompose._torch_private import has_composite_kernel, is_preservable
from lowerdeck.decompose.errors import DecomposeError
from lowerdeck.torch_base import OpOverload, returns_alias, written_arguments

Keep = Iterable[OpOverload] | Mapping[OpOverload, Callable[[Node], bool] | None]
"""Operators that stay whole; in a mapping, with a predicate on calls, or None for all calls."""


def can_keep(operator: object, *, some: bool = False) -> bool:
    """Return whether ``keep`` may name ``operator``.

    torch decomposes at once what may return its argument or a view of it, or writes.

    Args:
        operator: An overload of an operator; anything else cannot be kept.
        some: True if only some of its calls are kept.
    """
    if not isinstance(operator, OpOverload):
        return False
    if some and (written_arguments(operator) or returns_alias(operator)):
        return False
    return not has_composite_kernel(operator) or is_preservable(operator)


def check_kept(operator: Any, which: Any) -> None:
    """Raise an error for an invalid entry of ``keep``.

    Args:
        operator: The key of the entry.
        which: Its predicate, or None for all calls.

    Raises:
        DecomposeError: The operator cannot be kept, or cannot be kept for some calls only.
    """
    if not isinstance(operator, OpOverload):
        raise DecomposeError(
            f"keep names {operator!r}, not an overload of an operator: give overloads, such as "
            "torch.ops.aten.linear.default"
        )
    if which is not None and not callable(which):
        raise DecomposeError(
            f"keep has {which!r} for {operator}, expected a predicate on nodes, or None for all "
            "calls"
        )
    if not can_keep(operator, some=which is not None):
        raise DecomposeError(
            f"{operator} cannot be kept{'' if which is None else ' in part'}: it may return its "
            "argument or a view of it, or writes; leave it out of keep"
        )
