"""Encode untrusted data as JSON that is safe inside an HTML page."""

from __future__ import annotations

import json
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

from lowerdeck.serializer import printable

Item = TypeVar("Item", bound=Hashable)

LARGEST_EXACT = 2**53
"""Integers above this are not exact in a browser."""

_ESCAPES = {
    ord("<"): "\\u003c",  # no </script> and no <!--
    ord(">"): "\\u003e",
    ord("&"): "\\u0026",
}


def number(value: int) -> int | float:
    """Return ``value`` as a number that JavaScript can represent.

    Args:
        value: Any integer; sizes in a malformed file may have thousands of digits.

    Returns:
        The value itself if it is exact in a browser, else the nearest double, limited to ±2**64.
    """
    if -LARGEST_EXACT <= value <= LARGEST_EXACT:
        return value
    return float(max(min(value, 2**64), -(2**64)))


def clip(text: str, length: int = 400) -> str:
    """Return ``text`` escaped, and shortened in the middle if it is longer than ``length``.

    Args:
        length: Maximum number of characters.
    """
    if len(text) > length:
        half = length // 2
        text = f"{text[:half]} … {text[-half:]}"
    # Bidirectional control characters would show a name as another one.
    return printable(text)


def json_for_page(data: Any) -> str:
    """Return ``data`` as JSON for a ``<script type="application/json">`` element.

    Args:
        data: Lists, dictionaries with string keys, strings, finite numbers, booleans, None.

    Returns:
        ASCII text without ``<``, ``>`` and ``&``: it cannot end the element or begin another.

    Raises:
        ValueError: A number is infinite or NaN; such values must be passed as text.
    """
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.translate(_ESCAPES)


class Interned(Generic[Item]):
    """Distinct items in order of first appearance, each with its index.

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
        """Return the index of ``item``, adding it if it is new."""
        return self._numbers.setdefault(item, len(self._numbers))

    @property
    def items(self) -> list[Item]:
        """Return the distinct items by index."""
        return list(self._numbers)
