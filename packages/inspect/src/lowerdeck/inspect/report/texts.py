"""A table of distinct texts, so that a page holds each of them once."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class Interned(Generic[Item]):
    """Distinct items in order of first appearance, each with its number.

    Example:
        >>> names = Interned[str]()
        >>> names.number_of("conv"), names.number_of("relu"), names.number_of("conv")
        (0, 1, 0)
        >>> names.items
        ['conv', 'relu']
    """

    def __init__(self) -> None:
        self._numbers: dict[Item, int] = {}

    def number_of(self, item: Item) -> int:
        """Return the number of ``item``, which is new if it was not seen before."""
        return self._numbers.setdefault(item, len(self._numbers))

    @property
    def items(self) -> list[Item]:
        """Return the distinct items, at the positions that their numbers say."""
        return list(self._numbers)
