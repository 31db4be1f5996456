"""What installed distributions offer through entry points, where one supersedes another.

What moves to a distribution of its own has two owners where the old one is not upgraded, and the
order of folders would choose between them. So a distribution says whose entries its own replace:
an entry of the group ``lowerdeck.supersedes`` is named for the old distribution, and its value is
the module that everything is imported from now.

It is said once, by who took over. A list of names in every reader would have to grow with each
move; a comparison of versions tells nothing between different distributions; installers ignore
``Obsoletes-Dist``; and an error would end what worked before the new one was installed. Nobody
can take over by being installed alone: two that offer one name without a word stay ambiguous.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

SUPERSEDES = "lowerdeck.supersedes"


def installed_entries(group: str, name: str | None = None) -> list[EntryPoint]:
    """Return the entry points of a group, without those whose distribution is superseded.

    An entry is left out where a distribution that supersedes its own offers the same name in the
    same group. A ``UserWarning`` tells it, once a process for each pair of distributions and name.

    Args:
        group: Such as ``lowerdeck.backends``.
        name: Return entries of this name only; all if None.

    Returns:
        The entries, in the order in which they are found.
    """
    named: dict[str, list[EntryPoint]] = {}
    for entry in _entry_points(group):
        if name in (None, entry.name):
            named.setdefault(entry.name, []).append(entry)
    return [
        entry
        for entries in named.values()
        for entry in (_current(entries) if len(entries) > 1 else entries)
    ]


def _entry_points(group: str) -> Iterable[EntryPoint]:
    # An eighth of this package's import time, and only commands and registries need it.
    from importlib.metadata import entry_points

    return entry_points(group=group)


def _current(entries: Sequence[EntryPoint]) -> Sequence[EntryPoint]:
    """Return those of the entries of one name that no other of them supersedes."""
    offered = {_owner(entry): entry for entry in entries}
    newer = {
        plain_name(claim.name): claim
        for claim in _entry_points(SUPERSEDES)
        if _owner(claim) in offered and _owner(claim) != plain_name(claim.name)
    }
    current = [entry for entry in entries if _owner(entry) not in newer]
    if not current:
        # They supersede each other in a circle, which tells nothing.
        return entries
    for entry in entries:
        claim = newer.get(_owner(entry))
        if claim is not None:
            _warn(entry.name, _described(entry), _described(claim), claim.value)
    return current


# Not left to the filters of warnings, which forget what they have shown whenever anybody uses
# ``warnings.catch_warnings``, as torch does.
@functools.cache
def _warn(name: str, old: str, new: str, module: str) -> None:
    warnings.warn(
        f"{old} and {new} both offer {name!r}. Used is that of {new}, which supersedes the other: "
        f"import it from {module}, and upgrade or uninstall {old.partition(' ')[0]}",
        UserWarning,
        stacklevel=4,
    )


def _owner(entry: EntryPoint) -> str:
    """Return the name of the distribution that an entry belongs to, "" where nobody knows."""
    return plain_name(entry.dist.name) if entry.dist is not None else ""


def plain_name(name: str) -> str:
    """Return a distribution's name as the indexes compare them.

    Args:
        name: As somebody wrote it.
    """
    return re.sub(r"[-_.]+", "-", name).lower()


def _described(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "somebody"
