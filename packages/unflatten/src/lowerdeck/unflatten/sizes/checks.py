"""What a call checks of the sizes of its arguments that belong to those around it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lowerdeck.unflatten.errors import InputConstraintError

_TO_DO = (
    "pass arguments whose sizes belong together as the recorded ones do, put an eager module in "
    "its place, or export the model with what changes them in it."
)


def must_be_sizes(
    found: Sequence[Any],
    expected: Sequence[Any],
    name: str,
    places: Sequence[str],
    unchecked: bool = False,
) -> None:
    """Check that arguments have the sizes that belong to those which a module reads.

    Args:
        found: The sizes.
        expected: What they must be.
        name: The module's name.
        places: Which size of which argument each is.
        unchecked: Whether somebody asked for no checks.

    Raises:
        InputConstraintError: One is another one.
    """
    if unchecked or torch.compiler.is_exporting():
        return
    for size, wanted, place in zip(found, expected, places, strict=True):
        # Export has symbols, of which a question would fix the values.
        if type(size) is int and type(wanted) is int and size != wanted:
            raise InputConstraintError(
                f"{place} of {name!r} must be {wanted}: that follows from another size that the "
                f"module reads, as they were recorded; found {size}. The program does not hold "
                f"what the module computes for other sizes: {_TO_DO}"
            )


def exact_quotient(number: Any, divisor: Any) -> Any:
    """Return how often ``divisor`` goes into a number: graphs that 0.2 pickled call this."""
    return number // divisor
