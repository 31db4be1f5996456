"""The script ``lowerdeck``: what is installed is what is offered.

This package brings the commands that look at files. Others are found through the entry points
``lowerdeck.commands`` and loaded only when they are called, so that looking at a file never
imports torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points

from lowerdeck.serializer.commands.diff import DiffCommand
from lowerdeck.serializer.commands.extract import ExtractCommand
from lowerdeck.serializer.commands.inspect import InspectCommand
from lowerdeck.serializer.commands.protocol import Command
from lowerdeck.serializer.commands.verify import VerifyCommand
from lowerdeck.serializer.errors import SerializerError

GROUP = "lowerdeck.commands"
_OWN: Mapping[str, Command] = {
    "inspect": InspectCommand(),
    "verify": VerifyCommand(),
    "diff": DiffCommand(),
    "extract": ExtractCommand(),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Args:
        arguments: What stands behind ``lowerdeck`` on the command line; ``sys.argv`` by default.

    Returns:
        What the command returns; 2 where a file is wrong or cannot be opened.

    Raises:
        SystemExit: The arguments are wrong, or help was asked for.

    Example:
        >>> import contextlib, io
        >>> with contextlib.redirect_stdout(io.StringIO()) as shown:
        ...     main([])
        0
        >>> "inspect" in shown.getvalue()
        True
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if not arguments or arguments[0] in {"-h", "--help"}:
        print(_menu(found))
        return 0
    name = arguments[0]
    command = _OWN.get(name) or _load(name, found)
    parser = argparse.ArgumentParser(prog=f"lowerdeck {name}", description=command.help)
    command.configure(parser)
    args = parser.parse_args(arguments[1:])
    try:
        return command.run(args)
    except BrokenPipeError:
        # The reader of our output (``| head``) went away; that is no error of ours.
        sys.stderr.close()
        return 0
    except (SerializerError, OSError) as error:
        print(f"lowerdeck {name}: {error}", file=sys.stderr)
        return 2


def _load(name: str, found: Mapping[str, EntryPoint]) -> Command:
    if name not in found:
        known = ", ".join(sorted({*_OWN, *found}))
        print(
            f"lowerdeck: there is no command {name!r}; installed are: {known}. Other packages "
            "bring more (`lowerdeck-lowered-module`: lower, `lowerdeck-runner`: run).",
            file=sys.stderr,
        )
        raise SystemExit(2)
    command: Command = found[name].load()
    return command


def _menu(found: Mapping[str, EntryPoint]) -> str:
    """List the commands without loading those of other packages."""
    rows = [(name, command.help) for name, command in _OWN.items()]
    for name in sorted(found):
        owner = found[name].dist
        rows.append((name, f"from {owner.name}" if owner else f"from {found[name].module}"))
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name:<{width}}  {text}" for name, text in rows]
    return "\n".join(
        (
            "usage: lowerdeck COMMAND [ARGUMENT ...]",
            "",
            *lines,
            "",
            "`lowerdeck COMMAND --help` tells what a command takes.",
        )
    )
