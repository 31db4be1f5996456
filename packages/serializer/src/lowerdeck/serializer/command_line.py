"""The script ``lowerdeck``: what is installed is what is offered.

This package brings the commands that look at files. Others are found through the entry points
``lowerdeck.commands`` and loaded only when they are called, so that looking at a file never
imports torch.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    nullcontext,
    suppress,
)
from importlib.metadata import EntryPoint, distributions
from io import TextIOWrapper
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from lowerdeck.serializer.commands.answers import (
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
from lowerdeck.serializer.commands.completion import CompletionCommand
from lowerdeck.serializer.commands.diff import DiffCommand
from lowerdeck.serializer.commands.doctor import DoctorCommand
from lowerdeck.serializer.commands.extract import ExtractCommand
from lowerdeck.serializer.commands.inspect import InspectCommand
from lowerdeck.serializer.commands.operators import OperatorsCommand
from lowerdeck.serializer.commands.protocol import Command
from lowerdeck.serializer.commands.verify import VerifyCommand
from lowerdeck.serializer.installed import installed_entries

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

GROUP = "lowerdeck.commands"
Loading = Callable[[str], AbstractContextManager[None]]
_OWN: dict[str, Command] = {
    "inspect": InspectCommand(),
    "verify": VerifyCommand(),
    "diff": DiffCommand(),
    "extract": ExtractCommand(),
    "ops": OperatorsCommand(),
    "doctor": DoctorCommand(),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Args:
        arguments: What comes after ``lowerdeck`` on the command line; ``sys.argv`` by default.

    Returns:
        What the command returns, or the :class:`ExitStatus` of the error that ended it.

    Raises:
        SystemExit: The arguments are wrong, or help or the version was asked for.

    Example:
        >>> import contextlib, io
        >>> with contextlib.redirect_stdout(io.StringIO()) as shown:
        ...     status = main([])
        >>> status == 0 and "inspect" in shown.getvalue()
        True
    """
    return run_command(list(sys.argv[1:] if arguments is None else arguments))


def run_command(
    arguments: list[str],
    loading: Loading | None = None,
) -> int:
    """Run one command and return its exit status.

    Args:
        arguments: What comes after ``lowerdeck`` on the command line.
        loading: Called with the command's name, gives what its module is imported inside.

    Raises:
        SystemExit: The arguments are wrong, or help or the version was asked for.
    """
    name = arguments[0] if arguments else ""
    # Known before anything is parsed or loaded, for that can fail as well.
    debug = "--debug" in arguments
    with _any_encoding(), _interrupts() as interrupted:
        try:
            status = _run(arguments, loading)
            flush_stdout()
        except BrokenPipeError:
            # The reader of our output (``| head``) went away; that is no error of ours.
            _let_go_of_stdout()
            return ExitStatus.DONE
        except (Exception, KeyboardInterrupt) as error:
            if debug:
                _show_traceback(error)
            # What is interrupted while it imports may raise anything afterwards.
            if interrupted or isinstance(error, KeyboardInterrupt):
                complain(name, "interrupted")
                return ExitStatus.INTERRUPTED
            return _end(name, error)
        return status


def _show_traceback(error: BaseException) -> None:
    with suppress(OSError, ValueError, AttributeError):
        traceback.print_exception(error)


def _run(arguments: list[str], loading: Loading | None) -> int:
    found = {entry.name: entry for entry in installed_entries(GROUP)}
    if not arguments or arguments[0] in {"-h", "--help"}:
        say(*_menu(found).splitlines())
        return ExitStatus.DONE
    if arguments[0] == "--version":
        say(*_versions().splitlines())
        return ExitStatus.DONE
    name = arguments[0]
    command = _OWN.get(name)
    if command is not None and name != "completion":
        return command.run(_parser(name, command).parse_args(arguments[1:]))
    with nullcontext() if "--debug" in arguments else _quiet_libraries():
        if command is None:
            with loading(name) if loading else nullcontext():
                command = _load(name, found)
        return command.run(_parser(name, command).parse_args(arguments[1:]))


def _quiet_libraries() -> AbstractContextManager[None]:
    # Looking at a file needs no logging.
    from lowerdeck.serializer.commands.quiet import quiet_libraries

    return quiet_libraries()


def _parser(name: str, command: Command) -> argparse.ArgumentParser:
    parser = _Parser(prog=f"lowerdeck {name}", description=command.help, epilog=EXIT_STATUS_HELP)
    command.configure(parser)
    # A command that has an option of that name keeps its own.
    with suppress(argparse.ArgumentError):
        parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    with suppress(argparse.ArgumentError):
        parser.add_argument("--version", action=_VersionAction, nargs=0, help="what is installed")
    return parser


def _all_parsers() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of every installed command, an empty one of what cannot be loaded.

    A shell that starts has no use for the reason, which ``lowerdeck doctor`` tells.
    """
    found = {entry.name: entry for entry in installed_entries(GROUP)}
    parsers = {name: _parser(name, command) for name, command in _OWN.items()}
    for name in sorted(found.keys() - parsers.keys()):
        try:
            parsers[name] = _parser(name, _load(name, found))
        except CommandError:
            parsers[name] = argparse.ArgumentParser()
    return parsers


class _Parser(argparse.ArgumentParser):
    """Does not take help that nobody gets for told, and keeps usage errors off stdout."""

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        # Not by argparse, which lets nobody know that nothing was written.
        with printing():
            print(self.format_help(), end="", file=file)
        flush_stdout()

    def error(self, message: str) -> NoReturn:
        if is_closed("stderr"):
            # argparse would print to stdout instead.
            raise SystemExit(ExitStatus.USAGE)
        # Not by ``exit``, whose message would be the user's text as it is.
        self.print_usage(sys.stderr)
        complain(self.prog.partition(" ")[2], f"error: {message}")
        raise SystemExit(ExitStatus.USAGE)


class _VersionAction(argparse.Action):
    """Prints one package in a line, where argparse would fill one line with all."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        say(*_versions().splitlines())
        flush_stdout()
        parser.exit()


def _end(name: str, error: Exception) -> ExitStatus:
    """Say in one line what ended a command, and return its status."""
    status = status_of(error)
    if status is not None:
        complain(name, str(error) or type(error).__name__)
        return status
    complain(
        name,
        f"this is a fault of ours, not of your input: {type(error).__name__}: {error}; --debug "
        "shows where it is, please report it",
    )
    return ExitStatus.FAILED


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Yield a list that is empty until Ctrl-C; a host that handles that goes on doing so."""
    seen: list[int] = []
    ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if not ours:
        yield seen
        return

    def noted(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, noted)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def _any_encoding() -> Iterator[None]:
    """Let what a terminal's encoding cannot say be printed as an escape, and not end us.

    No other handler of errors does: not ``surrogateescape``, which Python chooses in the C locale,
    and those that never fail drop letters of names.
    """
    with ExitStack() as stack:
        for stream in (sys.stdout, sys.stderr):
            before = getattr(stream, "errors", None)
            if isinstance(stream, TextIOWrapper) and before is not None:
                stream.reconfigure(errors="backslashreplace")
                stack.callback(_set_errors, stream, before)
        yield


def _set_errors(stream: TextIOWrapper, errors: str) -> None:
    with suppress(ValueError, OSError):
        stream.reconfigure(errors=errors)


def _let_go_of_stdout() -> None:
    """Let Python's last flush of the output go nowhere: it would fail once more, and say so."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _load(name: str, found: Mapping[str, EntryPoint]) -> Command:
    if name not in found:
        known = ", ".join(sorted({*_OWN, *found}))
        complain(
            "",
            f"there is no command {name!r}; installed are: {known}. Other packages bring more "
            "(`lowerdeck-lowered-module`: lower, `lowerdeck-runner`: run).",
        )
        raise SystemExit(ExitStatus.USAGE)
    try:
        command: Command = found[name].load()
    except (Exception, SystemExit) as error:
        raise CommandError(
            f"this command ({found[name].value}) cannot be loaded: {type(error).__name__}: "
            f"{error}; --debug shows where",
            ExitStatus.FAILED,
        ) from error
    return command


_OWN["completion"] = CompletionCommand(_all_parsers)


def _versions() -> str:
    """Return the installed packages of ours with their versions, one in a line."""
    found = {
        distribution.metadata["Name"]: distribution.version
        for distribution in distributions()
        if re.match("lowerdeck(-|$)", distribution.metadata["Name"] or "")
    }
    return "\n".join(f"{name} {version}" for name, version in sorted(found.items()))


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
            "`lowerdeck COMMAND --help` tells what a command takes, `lowerdeck --version` what is "
            "installed.",
            f"Every command takes --debug; {EXIT_STATUS_HELP}.",
        )
    )
