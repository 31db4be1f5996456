"""What operator of the model failed: said in the error's own message."""

from __future__ import annotations

import linecache
from pathlib import Path
from types import TracebackType

import torch

FILE_PREFIX = "<lowerdeck.unflatten "
"""What the names of generated files begin with."""

_TORCH = str(Path(torch.__file__).parent)


def name_source(error: Exception) -> None:
    """Add to the message of ``error`` the line of the model whose generated code failed, in place.

    Args:
        error: An error on its way out. One whose message is no text, or that names a line
            already, stays as it is.
    """
    line = _failing_line(error.__traceback__)
    if line is None or len(error.args) != 1 or not isinstance(error.args[0], str):
        return
    code, _, source = line.strip().partition("  # ")
    if source and source not in error.args[0]:
        error.args = (f"{error.args[0]}\n(in {code!r}, which is {source})",)


def _failing_line(traceback: TracebackType | None) -> str | None:
    """Return the line of generated code that called what failed, if that was torch itself.

    What a hook or a module in the place of ours raises is its own affair.
    """
    found = None
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if file.startswith(FILE_PREFIX):
            found = linecache.getline(file, traceback.tb_lineno)
        elif not file.startswith(_TORCH):
            found = None
        traceback = traceback.tb_next
    return found
