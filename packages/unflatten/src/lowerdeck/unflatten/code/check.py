"""What looks at what a call returned, as the code has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol


class Check(Protocol):
    """Looks at what a call returned."""

    @property
    def texts(self) -> tuple[str, ...]:
        """What it is given beside the result: expressions, with the names of nodes in braces."""

    def names(self) -> Iterator[str]:
        """Yield the names of the nodes that are in these."""

    @property
    def check(self) -> Callable[..., None]:
        """What the code calls with the module that has the code, the result, and ``texts``."""
