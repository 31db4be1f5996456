"""The protocol of commands of the ``lowerdeck`` script."""

from __future__ import annotations

import argparse
from typing import Protocol


class Command(Protocol):
    """One command, which packages provide through the entry-point group ``lowerdeck.commands``.

    Attributes:
        help: One-line description.
    """

    help: str

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments."""

    def run(self, args: argparse.Namespace) -> int:
        """Run the command.

        Returns:
            The exit status, one of :class:`ExitStatus`.

        Raises:
            Exception: An error with an attribute ``exit_status`` ends the command with this status
                and its message in one line; other errors are reported as bugs.
        """
