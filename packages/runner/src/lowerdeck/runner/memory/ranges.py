"""Ranges of bytes in planned memory."""

from __future__ import annotations

Range = tuple[int, int, int]
"""Memory, first byte, and the byte after the last."""


def overlap(one: Range, other: Range) -> bool:
    """Return whether two ranges share a byte."""
    return one[0] == other[0] and one[1] < other[2] and other[1] < one[2]
