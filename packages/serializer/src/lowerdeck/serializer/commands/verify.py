"""``lowerdeck verify FILE ...``: whether files are safe to hand to the runtime."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lowerdeck.serializer.commands.external import is_external
from lowerdeck.serializer.errors import FormatError
from lowerdeck.serializer.external_read import open_ptd
from lowerdeck.serializer.model_files import open_model
from lowerdeck.serializer.read import open_pte
from lowerdeck.serializer.verify import verify_pte


class VerifyCommand:
    """Checks all that the runtime checks, and what it does not."""

    help = "check .pte and .ptd files beyond what the runtime checks"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments of the command.

        Args:
            parser: The parser of this command.
        """
        parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
        parser.add_argument(
            "--data",
            type=Path,
            action="append",
            default=[],
            metavar="PTD",
            help="external data that the .pte files must fit; may be given again",
        )
        parser.add_argument("-q", "--quiet", action="store_true", help="print refusals only")

    def run(self, args: argparse.Namespace) -> int:
        """Check each file and print the verdict.

        Args:
            args: The parsed arguments.

        Returns:
            0 if every file is right, else 1.

        Raises:
            OSError: A file cannot be opened.
        """
        status = 0
        for path in [*args.data, *args.files]:
            try:
                _verify(path, args.data)
            except FormatError as error:
                print(f"{path}: {type(error).__name__}: {error}", file=sys.stderr)
                status = 1
            else:
                if not args.quiet:
                    print(f"{path}: ok")
        return status


def _verify(path: Path, data: list[Path]) -> None:
    if is_external(path):
        # Reading the tables of a .ptd is checking them: nothing is left to the runtime.
        with open_ptd(path):
            return
    with open_pte(path) as file:
        verify_pte(file.data)
    if data:
        with open_model(path, data):
            return
