"""How large a table may be that compares all elements with all others."""

from __future__ import annotations

from typing import Any

from lowerdeck.emitter._torch_private import upper_bound

# Such a table is planned memory, one byte or more for each pair.
MOST_PAIRS = 2**26


def fits(pairs: Any) -> bool:
    """Return whether a table of ``pairs`` may be computed, at its upper bound if it varies.

    Args:
        pairs: How many pairs, a number or a symbolic one.
    """
    most = pairs if isinstance(pairs, int) else upper_bound(pairs)
    return most is not None and most <= MOST_PAIRS
