"""``lowerdeck verify FILE ...``: check whether files are safe to run."""

from __future__ import annotations

import argparse
from pathlib import Path

from lowerdeck.inspect.commands.answers import CommandError, ExitStatus, complain, reading, say
from lowerdeck.inspect.commands.external import is_external
from lowerdeck.serializer import Hazard, open_model, open_ptd, open_pte, verify_pte

_MOST_SHOWN = 20


class VerifyCommand:
    """Checks files more strictly than the runtime does; warns of hazards."""

    help = "check whether a file is safe to run"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments of the command."""
        parser.add_argument(
            "files", type=Path, nargs="+", metavar="FILE", help="a .pte or .ptd file"
        )
        parser.add_argument(
            "--data",
            type=Path,
            action="append",
            default=[],
            metavar="PTD",
            help="external data that must match the .pte files; may be repeated",
        )
        parser.add_argument("-q", "--quiet", action="store_true", help="print refusals only")

    def run(self, args: argparse.Namespace) -> int:
        """Check each file and print the verdict.

        Returns:
            0 if all files are valid, even with warnings, 3 if one is invalid or cannot be opened.
        """
        status = ExitStatus.DONE
        for path in [*args.data, *args.files]:
            hazards: list[Hazard] = []
            try:
                # Invalid data are not compared with the programs.
                _verify(path, args.data if status is ExitStatus.DONE else [], hazards)
            except CommandError as error:
                complain("verify", str(error))
                status = ExitStatus.BAD_INPUT
            else:
                if not args.quiet:
                    _report(path, hazards)
        return status


def _report(path: Path, hazards: list[Hazard]) -> None:
    for hazard in hazards[:_MOST_SHOWN]:
        say(f"{path}: warning: {hazard}")
    if len(hazards) > _MOST_SHOWN:
        say(f"{path}: warning: and {len(hazards) - _MOST_SHOWN} more warnings")
    say(f"{path}: ok")


def _verify(path: Path, data: list[Path], hazards: list[Hazard]) -> None:
    with reading(path):
        if is_external(path):
            # Reading a .ptd checks all of its tables.
            with open_ptd(path):
                return
        keys: set[str] = set()
        for data_path in data:
            with open_ptd(data_path) as external:
                keys.update(external.entries)
        reported: list[Hazard] = []
        with open_pte(path) as file:
            verify_pte(file.data, on_hazard=reported.append)
        hazards += [
            hazard for hazard in reported if not hazard.needs or not keys.issuperset(hazard.needs)
        ]
        if data:
            with open_model(path, data):
                return


command: VerifyCommand = VerifyCommand()
