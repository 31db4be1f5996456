"""Entry points of installed distributions."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def installed_entries(group: str, name: str | None = None) -> list[EntryPoint]:
    """Return the entry points of a group.

    Args:
        name: Return entries of this name only; all if None.

    Returns:
        The entries, in the order in which they are found.
    """
    # An eighth of this package's import time, and only commands and registries need it.
    from importlib.metadata import entry_points

    return [entry for entry in entry_points(group=group) if name in (None, entry.name)]


def plain_name(name: str) -> str:
    """Return a distribution's name, normalized as indexes compare them.

    Args:
        name: As it was written.
    """
    return re.sub(r"[-_.]+", "-", name).lower()
