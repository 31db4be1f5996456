"""Find, load and run the commands of installed packages.

Commands are entry points of the group ``lowerdeck.commands``. A command is imported when it is
called, so that commands that read files do not import torch.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from importlib.metadata import EntryPoint, distributions
from io import TextIOWrapper
from typing import TYPE_CHECKING, NoReturn

from lowerdeck.inspect.commands.answers import (
    EXIT_STATUS_HELP,
    CommandError,
    ExitStatus,
    complain,
    flush_stdout,
    is_closed,
    printing,
    say,
    status_of,
)
from lowerdeck.inspect.installed import installed_entries

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

    from lowerdeck.inspect.commands.answers import Command

GROUP = "lowerdeck.commands"
COMMANDS = {
    "lower": ("lowerdeck-lowered-module", "compile a PyTorch model to a .pte file"),
    "inspect": ("lowerdeck-inspect", "show what a .pte or .ptd file contains"),
    "verify": ("lowerdeck-inspect", "check whether a file is safe to run"),
    "run": ("lowerdeck-runner", "run a .pte file and show its outputs and timings"),
    "backends": ("lowerdeck-runner", "list installed backends and their operators"),
    "diff": ("lowerdeck-inspect", "compare two .pte files"),
    "extract": ("lowerdeck-inspect", "write delegates and constants of a file to a folder"),
    "ops": ("lowerdeck-inspect", "list the operators that a .pte file calls"),
    "lm": ("lowerdeck-language-models", "export, quantise and run language models"),
    "doctor": ("lowerdeck-inspect", "check the installation"),
    "completion": ("lowerdeck-inspect", "print a completion script for bash or zsh"),
}
"""Distribution and one-line help of each command. The table avoids imports of other packages,
which import torch, for help and errors.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Args:
        arguments: The command line after ``lowerdeck``; ``sys.argv`` by default.

    Returns:
        The command's result, or the :class:`ExitStatus` of the error that ended it.

    Raises:
        SystemExit: The arguments are invalid, or the help of a command was requested.

    Example:
        >>> import contextlib, io
        >>> with contextlib.redirect_stdout(io.StringIO()) as shown:
        ...     status = main([])
        >>> status == 0 and "inspect" in shown.getvalue()
        True
    """
    return run_command(list(sys.argv[1:] if arguments is None else arguments))


def run_command(arguments: list[str], loaded: Callable[[], None] = lambda: None) -> int:
    """Run one command and return its exit status.

    Args:
        arguments: The command line after ``lowerdeck``.
        loaded: Called when the command has been imported.

    Raises:
        SystemExit: The arguments are invalid, or the help of a command was requested.
    """
    name = arguments[0] if arguments else ""
    # Parsing and loading may fail, so the option is read first.
    debug = "--debug" in arguments
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # Other error handlers fail (``surrogateescape``, the default in the C locale) or drop
            # letters of names.
            stream.reconfigure(errors="backslashreplace")
    try:
        status = _run(arguments, loaded)
        flush_stdout()
    except BrokenPipeError:
        # The reader of the output (``| head``) closed the pipe, which is not an error.
        _discard_stdout()
        return ExitStatus.DONE
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            _show_traceback(error)
        if isinstance(error, KeyboardInterrupt):
            complain(name, "interrupted")
            return ExitStatus.INTERRUPTED
        return _end(name, error)
    return status


def _show_traceback(error: BaseException) -> None:
    with suppress(OSError, ValueError, AttributeError):
        traceback.print_exception(error)


def _run(arguments: list[str], loaded: Callable[[], None]) -> int:
    entries = {entry.name: entry for entry in installed_entries(GROUP)}
    if not arguments or arguments[0] in {"-h", "--help"}:
        say(*_menu(entries).splitlines())
        return ExitStatus.DONE
    if arguments[0] == "--version":
        say(*_versions().splitlines())
        return ExitStatus.DONE
    name = arguments[0]
    # Commands of this package import no library that warns.
    ours = COMMANDS.get(name, ("", ""))[0] == "lowerdeck-inspect"
    with nullcontext() if ours or "--debug" in arguments else quiet_libraries():
        command = _load(name, entries)
        loaded()
        return command.run(_parser(name, command).parse_args(arguments[1:]))


# torch warns of missing numpy, which we do not need; torchao of missing CUDA and of torch's
# version.
_WARNING = "Failed to initialize NumPy"
_LOGGERS = ("torchao", "torch.utils._pytree")


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Suppress warnings that torch and torchao emit on import; errors are shown."""
    import logging  # commands that read files need none

    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_WARNING, category=UserWarning)
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _parser(name: str, command: Command) -> argparse.ArgumentParser:
    parser = _Parser(prog=f"lowerdeck {name}", description=command.help, epilog=EXIT_STATUS_HELP)
    command.configure(parser)
    # A command may have its own option of that name.
    with suppress(argparse.ArgumentError):
        parser.add_argument("--debug", action="store_true", help="show the traceback of errors")
    return parser


def root_parser() -> argparse.ArgumentParser:
    """Return a parser with every installed command, for shell completion."""
    entries = {entry.name: entry for entry in installed_entries(GROUP)}
    parser = argparse.ArgumentParser(prog="lowerdeck")
    parser.add_argument("--version", action="store_true", help="print the installed versions")
    commands = parser.add_subparsers()
    for name in sorted(entries):
        # `lowerdeck doctor` reports commands that cannot be imported.
        with suppress(CommandError):
            command = _load(name, entries)
            command.configure(commands.add_parser(name, help=_description(name, entries)))
    return parser


class _Parser(argparse.ArgumentParser):
    """Parser that reports failures to write help and never prints usage errors to stdout."""

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        # argparse ignores errors of writing.
        with printing():
            print(self.format_help(), end="", file=file)
        flush_stdout()

    def error(self, message: str) -> NoReturn:
        if is_closed("stderr"):
            # argparse would print to stdout instead.
            raise SystemExit(ExitStatus.USAGE)
        # Not by ``exit``, which would print the user's text unescaped.
        self.print_usage(sys.stderr)
        complain(self.prog.partition(" ")[2], f"error: {message}")
        raise SystemExit(ExitStatus.USAGE)


def _end(name: str, error: Exception) -> ExitStatus:
    """Print one line about the error that ended a command, and return its status."""
    status = status_of(error)
    if status is not None:
        complain(name, str(error) or type(error).__name__)
        return status
    complain(
        name,
        f"this is a bug in lowerdeck, not in your input: {type(error).__name__}: {error}; please "
        "report it with the traceback that --debug shows",
    )
    return ExitStatus.FAILED


def _discard_stdout() -> None:
    """Discard Python's final flush of the output, which would fail again."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _load(name: str, entries: Mapping[str, EntryPoint]) -> Command:
    if name not in entries:
        names = ", ".join(sorted(entries))
        complain(
            "",
            f"{COMMANDS[name][0]} is not installed: pip install {COMMANDS[name][0]}"
            if name in COMMANDS
            else f"there is no command {name!r}; installed commands: {names}",
        )
        raise SystemExit(ExitStatus.USAGE)
    try:
        command: Command = entries[name].load()
    except (Exception, SystemExit) as error:
        raise CommandError(
            f"this command ({entries[name].value}) cannot be loaded: {type(error).__name__}: "
            f"{error}; --debug shows the traceback",
            ExitStatus.FAILED,
        ) from error
    return command


def _versions() -> str:
    """Return the installed Lowerdeck packages with their versions, one per line."""
    versions = {
        distribution.metadata["Name"]: distribution.version
        for distribution in distributions()
        if re.match("lowerdeck(-|$)", distribution.metadata["Name"] or "")
    }
    return "\n".join(f"{name} {version}" for name, version in sorted(versions.items()))


def _description(name: str, entries: Mapping[str, EntryPoint]) -> str:
    """Return the one-line description of a command without importing it."""
    if name in COMMANDS:
        return COMMANDS[name][1]
    distribution = entries[name].dist
    if distribution is None:
        return f"from {entries[name].module}"
    return distribution.metadata["Summary"] or f"from {distribution.name}"


def _menu(entries: Mapping[str, EntryPoint]) -> str:
    """Return the help text: Lowerdeck's installed commands in order of use, then any others."""
    names = [name for name in COMMANDS if name in entries]
    names += sorted(entries.keys() - COMMANDS.keys())
    width = max(map(len, names), default=0)
    return "\n".join(
        (
            "usage: lowerdeck COMMAND [ARGUMENT ...]",
            "",
            *(f"  {name:<{width}}  {_description(name, entries)}" for name in names),
            "",
            "`lowerdeck COMMAND --help` shows the arguments of a command, `lowerdeck --version` "
            "the installed packages.",
            f"Every command takes --debug; {EXIT_STATUS_HELP}.",
        )
    )
