"""Validation of the argument ``keep`` of ``decompose``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.fx import Node

from lowerdeck.decompose._torch_private import has_composite_kernel, is_preservable
from lowerdeck.decompose.errors import DecomposeError
from lowerdeck.torch_base import OpOverload, returns_alias, written_arguments

Keep = Iterable[OpOverload] | Mapping[OpOverload, Callable[[Node], bool] | None]
"""Operators that are not decomposed; a mapping may have a predicate on calls, or None for all."""


def can_keep(operator: object, *, some: bool = False) -> bool:
    """Return whether ``keep`` may contain ``operator``.

    torch always decomposes composite operators that mutate an argument or return an alias of one.

    Args:
        operator: An operator overload; other objects cannot be kept.
        some: Whether only some calls are kept.
    """
    if not isinstance(operator, OpOverload):
        return False
    if some and (written_arguments(operator) or returns_alias(operator)):
        return False
    return not has_composite_kernel(operator) or is_preservable(operator)


def check_kept(operator: Any, which: Any) -> None:
    """Validate an entry of ``keep``.

    Args:
        which: Predicate on calls, or None for all.

    Raises:
        DecomposeError: The entry is invalid, or the operator cannot be kept as requested.
    """
    if not isinstance(operator, OpOverload):
        raise DecomposeError(
            f"keep contains {operator!r}; expected operator overloads, such as "
            "torch.ops.aten.linear.default"
        )
    if which is not None and not callable(which):
        raise DecomposeError(
            f"keep has {which!r} for {operator}; expected a predicate on nodes, or None for all "
            "calls"
        )
    if not can_keep(operator, some=which is not None):
        raise DecomposeError(
            f"{operator} cannot be kept{'' if which is None else ' in part'}: it mutates or "
            "may return an alias; remove it from keep"
        )
