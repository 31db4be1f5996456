"""``lowerdeck completion``: what a shell completes, as a script that asks nobody.

Options stand in the script, so that a press of Tab loads no tensor library. It is written anew
after another part of Lowerdeck was installed.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from lowerdeck.serializer.commands.answers import ExitStatus, say

# zsh runs scripts of bash through a part of its own.
_FIRST = {
    "bash": "",
    "zsh": "autoload -U +X compinit && compinit -i\nautoload -U +X bashcompinit && bashcompinit\n",
}
_SCRIPT = """\
# By `lowerdeck completion {shell}`: write it anew after another part of Lowerdeck was installed.
{first}_lowerdeck() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}"
    local called="" words="" part
    for part in "${{COMP_WORDS[@]:1:$((COMP_CWORD-1))}}"; do
        case "${{called:+$called }}$part" in
{called}
        esac
    done
    case "$called $before" in
{values}
    *)
        case "$called" in
{words}
        esac
        # A word that is begun without a dash is a file where no command is expected.
        [[ "$word" == -* || "$words" != -* || -z "$called" ]] || words=""
        ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _lowerdeck lowerdeck
"""


@dataclass(slots=True)
class _Offered:
    """What can follow a command: names of commands below it, or options and their values."""

    commands: list[str] = field(default_factory=list)
    options: list[str] = field(default_factory=list)
    values: dict[str, list[str]] = field(default_factory=dict)


class CompletionCommand:
    """Prints a script that completes commands, options and their values."""

    help = "print a script that completes commands and options in bash or zsh"

    def __init__(self, parsers: Callable[[], Mapping[str, argparse.ArgumentParser]]) -> None:
        """Keep what is asked when the command runs.

        Args:
            parsers: Gives the parser of each command that is installed; loads them all.
        """
        self._parsers = parsers

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the argument of the command.

        Args:
            parser: The parser of this command.
        """
        parser.add_argument("shell", choices=sorted(_FIRST), help="for which shell")
        parser.epilog = (
            "bash: put it into ~/.local/share/bash-completion/completions/lowerdeck; zsh: into a "
            "file that ~/.zshrc sources"
        )

    def run(self, args: argparse.Namespace) -> int:
        """Print the script.

        Args:
            args: The parsed arguments.

        Returns:
            ``DONE``.
        """
        say(*completion_script(args.shell, self._parsers()).splitlines())
        return ExitStatus.DONE


def completion_script(shell: str, parsers: Mapping[str, argparse.ArgumentParser]) -> str:
    """Return a script that completes the commands of some parsers.

    Args:
        shell: ``bash`` or ``zsh``.
        parsers: The commands.
    """
    offered = {"": _Offered([*parsers, "--help", "--version"])}
    for name, parser in parsers.items():
        offered.update(_offered(name, parser))
    called = [name for name in offered if name]
    values = {
        f"{name} {option}": words
        for name, one in offered.items()
        for option, words in one.values.items()
    }
    return _SCRIPT.format(
        shell=shell,
        first=_FIRST[shell],
        called="\n".join(f"        {one}) called={one} ;;" for one in map(shlex.quote, called)),
        values="\n".join(_case("    ", at, words) for at, words in values.items()),
        words="\n".join(
            _case("        ", at, one.commands or one.options) for at, one in offered.items()
        ),
    )


def _case(indent: str, pattern: str, words: list[str]) -> str:
    return f"{indent}{shlex.quote(pattern)}) words={shlex.quote(' '.join(words))} ;;"


def _offered(name: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, _Offered]]:
    """Yield what follows a command, and the commands below it."""
    own = _Offered()
    for action in _actions(parser):
        if isinstance(action.choices, Mapping):
            for below, parser_below in action.choices.items():
                own.commands.append(below)
                yield from _offered(f"{name} {below}", parser_below)
        elif not action.option_strings:
            own.commands += map(str, action.choices or ())
        else:
            own.options += [one for one in action.option_strings if one.startswith("--")]
            for option in action.option_strings:
                if action.choices:
                    own.values[option] = [str(one) for one in action.choices]
    yield name, own


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return what a parser takes, as it tells whoever writes its help."""
    found: list[argparse.Action] = []

    class Listing(argparse.HelpFormatter):
        def add_argument(self, action: argparse.Action) -> None:
            found.append(action)

    parser.formatter_class = Listing
    parser.format_help()
    return found
