"""Which released and present versions of the packages one environment may hold together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import combinations

from tools.workspace import (
    BRAND,
    PACKAGES,
    is_known,
    newest,
    project,
    project_at,
    released_commit,
    releases,
    version_numbers,
)

_RANGE = re.compile(rf"{BRAND}-([a-z-]+)>=(\d+\.\d+\.\d+),<(\d+\.\d+)$")

# By sibling: the lowest version that fits, and the first one that does not fit any more.
Pins = Mapping[str, tuple[str, str]]
# By package and version: what it needs.
Known = Mapping[str, Mapping[str, Pins]]


def known_versions() -> dict[str, dict[str, Pins]]:
    """Return what each package's sources need, and what those of its releases need that are kept.

    Kept are the newest other release, which most who upgrade come from, and the last one of each
    earlier minor version: where a user's own pin holds a package back, it is there. Which of them
    stand beside today's packages is for the pins to say; patches between them are told apart from
    these by nothing but what was mended.
    """
    found = {}
    for package in PACKAGES:
        table = project(package)
        present = str(table["version"])
        found[package] = {present: pins(table["dependencies"])}
        recorded = releases().get(package, {})
        for version in kept_releases(present, recorded):
            if is_known(commit := recorded[version]):
                found[package][version] = pins(project_at(commit, package)["dependencies"])
    return found


def kept_releases(present: str, recorded: Iterable[str]) -> list[str]:
    """Choose the releases of a package that others are tried beside, newest first.

    Args:
        present: The version of its sources.
        recorded: All of its releases.
    """
    others = sorted(set(recorded) - {present}, key=version_numbers, reverse=True)
    kept = others[:1]
    for version in others:
        minor = version_numbers(version)[:2]
        if minor < min(version_numbers(one)[:2] for one in (present, *kept)):
            kept.append(version)
    return kept


def pins(requirements: Iterable[str]) -> Pins:
    """Return the range of each sibling that stands in a package's requirements."""
    matches = (_RANGE.match(requirement) for requirement in requirements)
    return {match[1]: (match[2], match[3]) for match in matches if match}


def largest_mixes(known: Known) -> list[dict[str, str]]:
    """Return every choice of versions that the pins allow and that no other package fits in.

    Smaller ones are parts of these: a package that nothing else needs changes nothing for the
    others but by its entry points, of which a test should rather have more.

    Args:
        known: The packages, lowest layer first.
    """
    mixes: list[dict[str, str]] = [{}]
    # A package needs nothing but lower ones, which are chosen already. Where one of its versions
    # fits, the mix without it is part of one with it.
    for package, versions in known.items():
        grown = []
        for mix in mixes:
            fitting = [version for version in versions if _fits(versions[version], mix)]
            grown += [{**mix, package: version} for version in fitting] or [mix]
        mixes = grown
    return mixes


def covering_mixes(mixes: list[dict[str, str]], together: int = 3) -> list[dict[str, str]]:
    """Choose from mixes, so that any few versions that stand together in one do so in a choice.

    The number of mixes doubles with almost each package that has two versions, and a mix takes
    half a minute; what breaks is between a package and those that it calls. So each three (or
    ``together``) are tried, not each thirteen. Greedy: the mix with most that is new comes next.
    """
    sizes = range(1, together + 1)
    held = [{few for size in sizes for few in combinations(mix.items(), size)} for mix in mixes]
    missing = set[tuple[tuple[str, str], ...]]().union(*held)
    chosen = []
    while missing:
        best = max(range(len(mixes)), key=lambda one: len(held[one] & missing))
        chosen.append(mixes[best])
        missing -= held[best]
    return chosen


def oldest_siblings(package: str) -> dict[str, str]:
    """Return the lowest version of each sibling that a package, and these siblings, admit."""
    wanted: dict[str, str] = {}
    waiting = [pins(project(package)["dependencies"])]
    while waiting:
        for sibling, (low, _) in waiting.pop().items():
            if newest((low, wanted.get(sibling, "0.0.0"))) != wanted.get(sibling):
                wanted[sibling] = low
                waiting.append(_needed_by(sibling, low))
    return wanted


def _needed_by(package: str, version: str) -> Pins:
    table, commit = project(package), released_commit(package, version)
    if table["version"] != version and commit is not None and is_known(commit):
        table = project_at(commit, package)
    return pins(table["dependencies"])


def _fits(needed: Pins, mix: Mapping[str, str]) -> bool:
    return all(
        sibling in mix
        and version_numbers(low) <= version_numbers(mix[sibling]) < version_numbers(f"{high}.0")
        for sibling, (low, high) in needed.items()
    )
