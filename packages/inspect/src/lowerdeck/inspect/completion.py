"""``lowerdeck completion``: print a completion script for a shell, made by shtab."""

from __future__ import annotations

import argparse

from lowerdeck.inspect.command_line import root_parser
from lowerdeck.inspect.commands.answers import ExitStatus


class CompletionCommand:
    """Prints a script that completes commands, options and their values."""

    help = "print a completion script for bash or zsh"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the argument of the command."""
        parser.add_argument("shell", choices=["bash", "zsh"], help="for which shell")
        parser.epilog = (
            "bash: write it to ~/.local/share/bash-completion/completions/lowerdeck; zsh: to a "
            "file _lowerdeck in a folder of $fpath. Options are part of the script: write it "
            "again after installing another package of Lowerdeck."
        )

    def run(self, args: argparse.Namespace) -> int:
        """Print the script; imports all installed commands."""
        import shtab

        print(shtab.complete(root_parser(), shell=args.shell))
        return ExitStatus.DONE


command: CompletionCommand = CompletionCommand()
