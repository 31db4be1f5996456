"""Run as a program by ``lowerdeck doctor``: load what it is told to, and say what came of each.

Takes names with the targets to load, as JSON from standard input; gives lines of JSON:
``[name]`` before each, so that a process that dies tells where, and ``[name, reason, culprit]``
after it, both empty where all is well.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import TracebackType
from typing import TextIO

_LONGEST = 300


def main() -> None:
    """Load everything."""
    wanted: dict[str, list[str]] = json.load(sys.stdin)
    # What is imported may print, too.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name, targets in wanted.items():
        _tell(answers, name)
        _tell(answers, name, *_loaded(targets))


def _tell(answers: TextIO, *told: str) -> None:
    print(json.dumps(told), file=answers, flush=True)


def _loaded(targets: list[str]) -> tuple[str, str]:
    """Return why targets cannot be loaded, and which installed package raised it."""
    for target in targets:
        try:
            EntryPoint("", target, "").load()
        except BaseException as error:
            return _reason(error), _culprit(error)
    return "", ""


def _first(error: BaseException) -> BaseException:
    """Return the error that the others were raised from."""
    seen = [error]
    while (before := seen[-1].__cause__ or seen[-1].__context__) and before not in seen:
        seen.append(before)
    return seen[-1]


def _reason(error: BaseException) -> str:
    first = _first(error)
    line = str(first).strip().partition("\n")[0]
    return f"{type(first).__name__}: {line}"[:_LONGEST]


def _culprit(error: BaseException) -> str:
    """Return the name of the package whose code the error came from, where it is not torch's."""
    first = _first(error)
    found = [_package(frame) for frame in _frames(first.__traceback__)]
    others = [one for one in found if one and one not in ("torch", "lowerdeck")]
    return others[-1] if others else ""


def _frames(trace: TracebackType | None) -> list[str]:
    files = []
    while trace is not None:
        files.append(trace.tb_frame.f_code.co_filename)
        trace = trace.tb_next
    return files


def _package(file: str) -> str:
    """Return the name of the outermost package or module that a file is of, as it is imported."""
    for folder in sorted(sys.path, key=len, reverse=True):
        if folder and Path(folder).name != "lib-dynload" and Path(file).is_relative_to(folder):
            parts = Path(file).relative_to(folder).parts
            outside = "site-packages" in file or "dist-packages" in file
            known = outside or parts[0].removesuffix(".py") not in sys.stdlib_module_names
            return parts[0].removesuffix(".py") if known else ""
    return ""


if __name__ == "__main__":
    main()
