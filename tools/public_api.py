"""Compare what two states of one package offer at their front doors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import griffe

# Subpackages that users import from, beside the front door.
SIDE_DOORS = {"testing"}


def breaks(
    module: str, old: Path, new: Path, siblings: Mapping[str, Path] = MappingProxyType({})
) -> list[str]:
    """Return what a user of ``module`` must change to move from ``old`` to ``new``, line by line.

    Args:
        module: The dotted name of the package, ``lowerdeck.serializer`` for instance.
        old: The folder that holds the top of the module's old sources.
        new: The same for the new sources.
        siblings: Modules that it may inherit from, with the folders of their sources.

    Returns:
        One line for each public name that is gone or takes or gives something else. Modules behind
        the front door are free to change; what the front door shows of them is not.
    """
    before, after = (_front_door(module, sources, siblings) for sources in (old, new))
    # griffe lets a name pass that leaves __all__ and can still be imported.
    hidden = sorted(_exports(before) - _exports(after))
    changed = griffe.find_breaking_changes(before, after)
    return [f"`{name}`: *Public object was removed*" for name in hidden] + [
        _line(breakage)
        for breakage in changed
        if not _is_removal(breakage, hidden)
        # griffe takes `self.__class__ = ...` for an attribute of its own.
        and breakage.obj.name != "__class__"
    ]


def _front_door(module: str, sources: Path, siblings: Mapping[str, Path]) -> griffe.Module:
    loader = griffe.GriffeLoader(search_paths=[sources, *siblings.values()])
    loaded = loader.load(module)
    # What a class inherits is public as well.
    for sibling in siblings:
        loader.load(sibling)
    loader.resolve_aliases()
    if not isinstance(loaded, griffe.Module):
        raise TypeError(f"{module} is a {type(loaded).__name__}, expected a package with sources")
    _shut(loaded)
    return loaded


def _shut(package: griffe.Module) -> None:
    """Mark the modules behind a front door, which griffe takes for public, as private."""
    for member in package.members.values():
        if isinstance(member, griffe.Module):
            member.public = member.name in SIDE_DOORS
            _shut(member)


def _exports(door: griffe.Module) -> set[str]:
    return {str(name) for name in door.exports or ()}


def _is_removal(breakage: griffe.Breakage, names: list[str]) -> bool:
    return breakage.kind is griffe.BreakageKind.OBJECT_REMOVED and breakage.obj.name in names


def _line(breakage: griffe.Breakage) -> str:
    # The other styles colour the line for a terminal.
    return breakage.explain(griffe.ExplanationStyle.MARKDOWN).removeprefix("- ")
