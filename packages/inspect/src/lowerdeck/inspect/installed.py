"""Entry points of installed distributions."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def installed_entries(group: str, name: str | None = None) -> list[EntryPoint]:
    """Return the entry points of a group.

    Args:
        name: Name of the entries to return, None for all.

    Returns:
        The entries in search order.
    """
    # Imported here, because the import is slow.
    from importlib.metadata import entry_points

    return [entry for entry in entry_points(group=group) if name in (None, entry.name)]
