"""Round offsets, and check alignments that a caller requests."""

from __future__ import annotations

from math import lcm

from lowerdeck.serializer.errors import ProgramError
from lowerdeck.serializer.escaping import shown

MAX_ALIGNMENT = 1 << 30
"""Above this an alignment is surely a mistake: the padding alone would be a gigabyte."""


def round_up(offset: int, alignment: int) -> int:
    """Return the smallest multiple of ``alignment`` that is at least ``offset``."""
    return -(-offset // alignment) * alignment


def lowest_bit(number: int) -> int:
    """Return the largest power of two that divides ``number`` (which is not 0)."""
    return number & -number


def check_power_of_two(alignment: int, name: str) -> None:
    """Refuse an alignment that FlatBuffers cannot promise.

    Raises:
        ProgramError: ``alignment`` is not a power of two from 1 to 2**30.
    """
    check_positive(alignment, name)
    if alignment & (alignment - 1):
        raise ProgramError(f"{name}: found {alignment}, expected a power of two, such as 16")


def check_positive(alignment: int, name: str) -> None:
    """Refuse an alignment that is not a positive number, or is absurdly large.

    Raises:
        ProgramError: ``alignment`` is below 1 or above 2**30.
    """
    if not isinstance(alignment, int):
        raise ProgramError(f"{name}: found {shown(alignment)}, expected a whole number")
    if not 1 <= alignment <= MAX_ALIGNMENT:
        raise ProgramError(f"{name}: found {shown(alignment)}, expected 1 to {MAX_ALIGNMENT}")


def common_alignment(left: int, right: int) -> int:
    """Return the least alignment that keeps both.

    Raises:
        ProgramError: It is absurdly large. It is refused as it grows: the common multiple of a
            file's many alignments could become a number as long as the file.
    """
    common = lcm(left, right)
    if common > MAX_ALIGNMENT:
        raise ProgramError(
            f"the alignments that were asked for have the common multiple {common}, which is "
            f"above {MAX_ALIGNMENT}; ask for powers of two"
        )
    return common
