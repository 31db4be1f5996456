"""Round offsets and check requested alignments."""

from __future__ import annotations

from math import lcm

from lowerdeck.serializer.errors import ProgramError
from lowerdeck.serializer.escaping import shown

MAX_ALIGNMENT = 1 << 30
"""Largest accepted alignment; its padding can already take a gigabyte."""


def round_up(offset: int, alignment: int) -> int:
    """Return the smallest multiple of ``alignment`` that is at least ``offset``."""
    return -(-offset // alignment) * alignment


def lowest_bit(number: int) -> int:
    """Return the largest power of two that divides ``number`` (which is not 0)."""
    return number & -number


def check_power_of_two(alignment: int, name: str) -> None:
    """Raise unless an alignment is valid for a FlatBuffer.

    Args:
        name: Name of the option, for the message.

    Raises:
        ProgramError: ``alignment`` is not a power of two from 1 to 2**30.
    """
    check_positive(alignment, name)
    if alignment & (alignment - 1):
        raise ProgramError(f"{name}: found {alignment}, expected a power of two, such as 16")


def check_positive(alignment: int, name: str) -> None:
    """Raise unless an alignment is a positive integer in range.

    Args:
        name: Name of the option, for the message.

    Raises:
        ProgramError: ``alignment`` is not an integer from 1 to 2**30.
    """
    if not isinstance(alignment, int):
        raise ProgramError(f"{name}: found {shown(alignment)}, expected an integer")
    if not 1 <= alignment <= MAX_ALIGNMENT:
        raise ProgramError(f"{name}: found {shown(alignment)}, expected 1 to {MAX_ALIGNMENT}")


def common_alignment(left: int, right: int) -> int:
    """Return the least common multiple of two alignments.

    Raises:
        ProgramError: The multiple exceeds ``MAX_ALIGNMENT``.
    """
    common = lcm(left, right)
    if common > MAX_ALIGNMENT:
        raise ProgramError(
            f"the requested alignments have the common multiple {common}, above the limit "
            f"{MAX_ALIGNMENT}; use powers of two"
        )
    return common
