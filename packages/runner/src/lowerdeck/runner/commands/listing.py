"""The command ``lowerdeck backends``: installed backends and the operators that they support."""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import EntryPoint
from typing import Any

from lowerdeck.inspect import ExitStatus, installed_entries, say

_GROUPS = {
    "ahead of time": "lowerdeck.backends",
    "partitioner": "lowerdeck.partitioners",
    "runtime": "lowerdeck.runtimes",
}


@dataclass(frozen=True, slots=True)
class InstalledBackend:
    """One backend, as registered by its entry points.

    Attributes:
        halves: The installed parts, with the places where they are defined.
        distribution: The distribution that registers it, with its version.
        description: First line of its documentation.
        operators: Operators that it supports, as far as a part lists them.
        problem: Why a part cannot be imported; empty if all can.
    """

    name: str
    halves: dict[str, str]
    distribution: str
    description: str
    operators: tuple[str, ...]
    problem: str


class BackendsCommand:
    """List the installed backends."""

    help = "list installed backends and what each can run"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments of the command.

        Args:
            parser: The parser of this command.
        """
        parser.add_argument("--json", action="store_true", help="print JSON for machines")
        parser.add_argument("--operators", action="store_true", help="list the operators of each")

    def run(self, args: argparse.Namespace) -> int:
        """Print the list, and return the exit code.

        Returns:
            0.
        """
        backends = installed_backends()
        if args.json:
            say(*json.dumps([asdict(backend) for backend in backends], indent=2).splitlines())
            return ExitStatus.DONE
        if not backends:
            say("no backends are installed; lowerdeck-xnnpack brings one")
        for backend in backends:
            for line in _lines(backend, with_operators=args.operators):
                say(line)
        return ExitStatus.DONE


def installed_backends() -> list[InstalledBackend]:
    """Return all backends with at least one installed part, by name."""
    entries: dict[str, dict[str, EntryPoint]] = {}
    for half, group in _GROUPS.items():
        for entry in installed_entries(group):
            entries.setdefault(entry.name, {})[half] = entry
    return [_examined(name, halves) for name, halves in sorted(entries.items())]


def _examined(name: str, halves: dict[str, EntryPoint]) -> InstalledBackend:
    parts, problems = [], []
    for half, entry in halves.items():
        try:
            parts.append(entry.load())
        except (Exception, SystemExit) as error:  # a broken backend must not hide the others
            problems.append(f"{half}: {type(error).__name__}: {error}")
    return InstalledBackend(
        name,
        {half: entry.value for half, entry in halves.items()},
        _distribution(next(iter(halves.values()))),
        _about(parts[0]) if parts else "",
        tuple(sorted({name for part in parts for name in _operators(part)})),
        "; ".join(problems),
    )


def _about(part: object) -> str:
    # Not an inherited docstring, which describes the base class.
    own = vars(part).get("__doc__") if isinstance(part, type) else part.__doc__
    return inspect.cleandoc(own or "").partition("\n")[0]


def _distribution(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else ""


def _operators(part: object) -> Iterable[str]:
    """Return the ``supported_operators`` of a part, which is a function or a collection."""
    supported: Any = getattr(part, "supported_operators", ())
    try:
        return [str(operator) for operator in (supported() if callable(supported) else supported)]
    except TypeError:
        return []


def _lines(backend: InstalledBackend, *, with_operators: bool) -> list[str]:
    lines = [f"{backend.name}  ({', '.join(backend.halves)}; {backend.distribution})"]
    if backend.description:
        lines.append(f"    {backend.description}")
    if backend.operators:
        lines.append(f"    supports {len(backend.operators)} operators")
    if with_operators:
        lines += [f"        {operator}" for operator in backend.operators]
    if backend.problem:
        lines.append(f"    cannot be used: {backend.problem}")
    return lines
