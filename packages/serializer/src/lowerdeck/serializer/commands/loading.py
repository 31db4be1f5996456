"""Whether what is installed can be loaded, found out in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_SECONDS = 120.0
"""How long all of it may take; on a slow disk the first import of torch takes half a minute."""
_PROGRAM = "lowerdeck.serializer.commands.try_imports"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a part that is installed cannot be used.

    Attributes:
        reason: What was raised, or how the process ended.
        culprit: The imported package that raised it; "" where that is not known.
    """

    reason: str
    culprit: str = ""


def failures(
    parts: Mapping[str, Sequence[str]], *, seconds: float = _SECONDS
) -> dict[str, Failure]:
    """Return which parts cannot be loaded, and why.

    Args:
        parts: By name, what to load of each: ``"module"`` or ``"module:attribute"``.
        seconds: After how long to give up.
    """
    left, found = dict(parts), dict[str, Failure]()
    while left:
        told, ended = _tried(left, seconds)
        begun = ""
        for name, *outcome in told:
            begun = name
            if outcome:
                left.pop(name, None)
                begun = ""
                if outcome[0]:
                    found[name] = Failure(*outcome)
        if not left:
            break
        # The process ended on the way: in this part, or before it came to any.
        if not begun:
            return found | {name: Failure(ended) for name in left}
        left.pop(begun)
        found[begun] = Failure(ended)
    return found


def _tried(parts: Mapping[str, Sequence[str]], seconds: float) -> tuple[list[list[str]], str]:
    """Return the lines that one process told, and how it ended."""
    try:
        # Without the current folder, which the command `lowerdeck` does not look into either.
        done = subprocess.run(
            [sys.executable, "-P", "-m", _PROGRAM],
            input=json.dumps({name: list(targets) for name, targets in parts.items()}),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        text = output.decode(errors="replace") if isinstance(output, bytes) else output
        ended = f"importing it did not end within {seconds:g} s"
    except OSError as error:
        return [], f"no process can be started to try it: {error}"
    else:
        text = done.stdout
        ended = f"importing it ends the process with status {done.returncode}"
    lines = [line for line in text.splitlines() if line.endswith("]")]
    return [json.loads(line) for line in lines], ended
