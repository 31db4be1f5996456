"""Size limit of tables that compare all pairs of elements."""

from __future__ import annotations

from typing import Any

from lowerdeck.torch_base import size_range

# The table is in planned memory, with one byte or more per pair.
MOST_PAIRS = 2**26


def fits(pairs: Any) -> bool:
    """Return whether a table of ``pairs`` is small enough, at its upper bound if dynamic.

    Args:
        pairs: Number of pairs, possibly symbolic.
    """
    largest = size_range(pairs)[1]
    return largest is not None and largest <= MOST_PAIRS
