"""Data as JSON that is safe inside an HTML page, whatever the file it came from holds."""

from __future__ import annotations

import json
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

from lowerdeck.serializer import printable

Item = TypeVar("Item", bound=Hashable)

LARGEST_EXACT = 2**53
"""Whole numbers above this are not exact in a browser."""

_ESCAPES = {
    ord("<"): "\\u003c",  # no </script> and no <!--
    ord(">"): "\\u003e",
    ord("&"): "\\u0026",
}


def number(value: int) -> int | float:
    """Return ``value`` as a number that JavaScript reads without trouble.

    Args:
        value: Any whole number; a hostile file holds sizes of thousands of digits.

    Returns:
        The value itself where it is exact in a browser, else the nearest double, and at most
        2**64 in either direction.
    """
    if -LARGEST_EXACT <= value <= LARGEST_EXACT:
        return value
    return float(max(min(value, 2**64), -(2**64)))


def clip(text: str, length: int = 400) -> str:
    """Return ``text`` printable, shortened in its middle when it is longer than ``length``.

    Args:
        length: The most characters to keep.
    """
    if len(text) > length:
        half = length // 2
        text = f"{text[:half]} … {text[-half:]}"
    # In a page nothing steers a terminal, but a character that turns the order of what follows
    # would show a name as another one.
    return printable(text)


def json_for_page(data: Any) -> str:
    """Return ``data`` as JSON to go inside a ``<script type="application/json">``.

    Args:
        data: Lists, dictionaries with text as keys, texts, finite numbers, truth values, None.

    Returns:
        ASCII text without ``<``, ``>`` and ``&``, so nothing in it can end the element that
        holds it or begin another.

    Raises:
        ValueError: A number is infinite or not a number; such values are shown as text.
    """
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.translate(_ESCAPES)


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
