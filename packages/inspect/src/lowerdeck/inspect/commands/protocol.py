"""The protocol of commands of the ``lowerdeck`` script."""

from __future__ import annotations

import argparse
from typing import Protocol


class Command(Protocol):
    """One command, as other packages offer it through the entry points ``lowerdeck.commands``.

    Attributes:
        help: What it does, in one line.
    """

    help: str

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments."""

    def run(self, args: argparse.Namespace) -> int:
        """Do it.

        Returns:
            The exit status, one of :class:`ExitStatus`.

        Raises:
            Exception: An error with an attribute ``exit_status`` ends the command with it and one
                line, its message; any other one is reported as a bug.
        """
