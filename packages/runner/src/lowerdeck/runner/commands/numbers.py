"""Argument types of several commands."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def count(text: str) -> int:
    """Return a number of calls."""
    if not text.isascii() or not text.isdigit() or not 1 <= len(text) <= 9 or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of calls, which is 1 or more")
    return int(text)


def seed(text: str) -> int:
    """Return a seed that torch takes."""
    try:
        number = int(text)
    except ValueError:
        number = 2**64
    if not -(2**63) <= number < 2**64:
        raise argparse.ArgumentTypeError(f"{text!r} is not a seed, which is a number of 64 bits")
    return number


def method_name(names: Sequence[str], wanted: str | None) -> str:
    """Return the method to use: the named one, the only one, or ``forward``.

    Args:
        names: The methods of the program.
    """
    return wanted if wanted is not None else names[0] if len(names) == 1 else "forward"
