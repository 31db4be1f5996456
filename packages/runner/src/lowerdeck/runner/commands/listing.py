"""The command ``lowerdeck backends``: installed backends and the operators that they support."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from importlib.metadata import EntryPoint
from typing import Any

from lowerdeck.inspect import ExitStatus, installed_entries, say

_GROUPS = {
    "lowerdeck.backends": "compiles",
    "lowerdeck.partitioners": "partitions",
    "lowerdeck.runtimes": "runs",
}


class BackendsCommand:
    """List the installed backends."""

    help = "list installed backends and their operators"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments of the command."""
        parser.add_argument("--operators", action="store_true", help="list the operators of each")

    def run(self, args: argparse.Namespace) -> int:
        """Print the backends.

        Returns:
            ``DONE``.
        """
        backends: dict[str, dict[str, EntryPoint]] = {}
        for group, verb in _GROUPS.items():
            for entry in installed_entries(group):
                backends.setdefault(entry.name, {})[verb] = entry
        if not backends:
            say("no backends are installed: pip install lowerdeck-xnnpack")
        for name, entries in sorted(backends.items()):
            owner = next(iter(entries.values())).dist
            owned_by = f"{owner.name} {owner.version}" if owner else "an unknown distribution"
            say(f"{name} {', '.join(entries)}  ({owned_by})")
            operators: set[str] = set()
            for verb, entry in entries.items():
                try:
                    operators.update(_operators(entry.load()))
                except (Exception, SystemExit) as error:  # A broken backend must not hide others.
                    say(f"  {verb}: CANNOT BE IMPORTED: {type(error).__name__}: {error}")
            if args.operators:
                say(*(f"  {operator}" for operator in sorted(operators)))
        return ExitStatus.DONE


def _operators(part: Any) -> Iterable[str]:
    supported = getattr(part, "supported_operators", ())
    return map(str, supported() if callable(supported) else supported)
