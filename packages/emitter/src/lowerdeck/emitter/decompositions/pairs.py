"""Size limit of tables that compare all pairs of elements."""

from __future__ import annotations

from typing import Any

from lowerdeck.torch_base import size_range

# Such a table is planned memory, one byte or more for each pair.
MOST_PAIRS = 2**26


def fits(pairs: Any) -> bool:
    """Return whether a table of ``pairs`` may be computed, at its upper bound if it varies.

    Args:
        pairs: How many pairs, a number or a symbolic one.
    """
    most = size_range(pairs)[1]
    return most is not None and most <= MOST_PAIRS
