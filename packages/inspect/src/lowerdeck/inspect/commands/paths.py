"""Check that output paths are distinct, are in existing folders and are not inputs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import combinations
from pathlib import Path

from lowerdeck.inspect.commands.answers import CommandError, ExitStatus

NamedPath = tuple[str, str | os.PathLike[str] | None]
"""Name of an argument and its path, None if it is absent."""


def check_paths(*, read: Iterable[NamedPath], written: Iterable[NamedPath]) -> None:
    """Raise if an output is an input or another output, or if its folder is missing.

    Files are compared by identity: links and relative paths are resolved. Devices and pipes are
    exempt: writing does not replace them.

    Args:
        read: Inputs of the command.
        written: Outputs of the command, existing or not.

    Raises:
        CommandError: Two arguments are the same file (exit status ``USAGE``), or the folder of an
            output is missing (exit status ``FAILED``).

    Example:
        >>> check_paths(read=[("FILE", "a.pte")], written=[("--html", "a.html")])
        >>> check_paths(read=[("FILE", "a.pte")], written=[("--html", "./a.pte")])
        Traceback (most recent call last):
        lowerdeck.inspect.commands.answers.CommandError: --html ./a.pte is the file that FILE a.pte names: nothing was written, give another path
    """  # noqa: E501
    outputs = list(written)
    pairs = [(output, source) for source in read for output in outputs]
    pairs += [(later, earlier) for earlier, later in combinations(outputs, 2)]
    for (name, path), (other_name, other) in pairs:
        if path is not None and other is not None and _one_file(path, other):
            raise CommandError(
                f"{name} {os.fspath(path)} is the file that {other_name} {os.fspath(other)} "
                "names: nothing was written, give another path",
                ExitStatus.USAGE,
            )
    for name, path in outputs:
        # Report a misspelt folder now, not after minutes of work.
        if path is not None and not Path(path).parent.is_dir():
            raise CommandError(
                f"cannot write {name} {os.fspath(path)}: there is no folder {Path(path).parent}; "
                "create it, or give another path",
                ExitStatus.FAILED,
            )


def _one_file(path: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    # Compare resolved paths as well: a missing file has no identity.
    if os.path.realpath(path) == os.path.realpath(other):
        return not _is_special(Path(path))
    try:
        return Path(path).samefile(other) and not _is_special(Path(path))
    except (OSError, ValueError):
        return False


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()
