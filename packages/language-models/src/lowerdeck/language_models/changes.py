"""Text lengths at which a model changes: sliding windows, chunks, long positions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

SHORT = 4
"""Reduced text length at which a model changes during the trial."""

_NAMES = re.compile(
    r"window(?!_(layers|pattern))|chunk|local_att|index_topk|floor|distance|original_max"
)
"""Names of configuration entries with text lengths: windows, chunks and position changes."""


def changes_of(model: nn.Module, context: int) -> Mapping[int, str]:
    """Return the text lengths below ``context`` at which a model changes, and their settings."""
    changed = {
        table[name]: name
        for table in _configured(model)
        for name in table
        if _is_change(name, table[name]) and table[name] < context
    }
    return dict(sorted(changed.items()))


@contextmanager
def shortened(model: nn.Module, count: int) -> Iterator[None]:
    """Move the change at ``count`` tokens to a few tokens, so that short texts test it."""
    changed = []
    for table in (*_configured(model), *map(vars, model.modules())):
        for name, value in table.items():
            if _is_change(name, value) and value == count:
                changed.append((table, name))
    for table, name in changed:
        table[name] = min(SHORT, count)
    try:
        yield
    finally:
        for table, name in changed:
            table[name] = count


def _is_change(name: object, value: object) -> bool:
    is_count = type(value) is int and value > 1
    return is_count and isinstance(name, str) and _NAMES.search(name) is not None


def _configured(model: nn.Module) -> list[dict[str, Any]]:
    """Return the attributes of all distinct configurations of a model and its modules."""
    configs = [vars(module).get("config") for module in model.modules()]
    configured: dict[int, dict[str, Any]] = {}
    left = [vars(config) for config in configs if hasattr(config, "__dict__")]
    while left:
        table = left.pop()
        if id(table) in configured:
            continue
        configured[id(table)] = table
        left += _inside(table.values())
    return list(configured.values())


def _inside(values: Iterable[Any]) -> Iterator[dict[str, Any]]:
    for value in values:
        if isinstance(value, dict):
            yield value
        elif hasattr(value, "to_dict"):  # a nested configuration
            yield vars(value)
