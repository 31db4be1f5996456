"""Add the line of the model to the message of an error that generated code raises."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import TracebackType

import torch

from lowerdeck.torch_base import SourceFrame, source_frames
from lowerdeck.unflatten import contract, specializations
from lowerdeck.unflatten.attributes import PRIVATE
from lowerdeck.unflatten.call_signature import one_line
from lowerdeck.unflatten.errors import UnflattenError

FILE_PREFIX = "<lowerdeck.unflatten "
"""Beginning of the names of generated files."""

NAME_SOURCE = "_lowerdeck_name_source"
"""Global name of ``name_source`` in generated code."""

TORCH_FOLDER = str(Path(torch.__file__).parent)
"""Folder of torch's own lines; lines of its layers say little about the model."""

_OURS = {specializations.__file__, contract.__file__}
_MESSAGE = "_lowerdeck_message"
"""Attribute of an error with its original message."""


def with_handler(text: str) -> str:
    """Return a function's source with a handler that names the model's line in errors.

    The handler costs nothing until a line fails.

    Args:
        text: The source; its first line is the whole signature.
    """
    head, _, body = text.rstrip("\n").partition("\n")
    return f"{head}\n    try:\n    " + body.replace("\n", "\n    ") + _HANDLER


_HANDLER = f"""
    except Exception:
        {NAME_SOURCE}(self)
        raise
"""


def name_source(module: torch.nn.Module) -> None:
    """Add the model's line to the message of the error that is being handled, in place.

    An error whose message is not text, or names a line already, stays as it is.

    Args:
        module: The module whose generated code raised the error.
    """
    error = None if torch.compiler.is_compiling() else sys.exception()
    if error is None or len(error.args) != 1:
        return
    if type(error) is KeyError and _is_last_frame_ours(error):
        raise UnflattenError(
            f"this module calls its child {error.args[0]!r}, which was deleted. Put one there."
        ) from error
    message = getattr(error, _MESSAGE, error.args[0])
    if not isinstance(message, str):
        return
    failing = [line.strip().partition("  # ") for line in _failing_lines(error.__traceback__)]
    if not failing:
        return
    code, _, source = failing[-1]
    if not source or source in message:
        return
    around = [line for _, _, line in failing if line and not line.startswith(TORCH_FOLDER)]
    caller = ""
    if source.startswith(TORCH_FOLDER):
        caller = around[-1] if around else _caller_of(module, source)
    suffix = f", called by {caller}" if caller else ""
    error.__dict__[_MESSAGE] = message
    error.args = (f"{message}\n(in {code!r}, which is {source}{suffix})",)


@lru_cache(4096)
def location(frame: SourceFrame) -> str:
    """Return the location of a frame in the model, on one line."""
    return one_line(f"{frame.file}:{frame.line} in {frame.function}: {frame.code}")


def _caller_of(module: torch.nn.Module, source: str) -> str:
    """Return the model's line that called a layer of torch, or "" if it is unknown.

    Comments do not name it: layers that compute the same share their code.
    """
    body = module.__dict__[PRIVATE]
    for specialization in (body, *body.others):
        for node in specialization.graph.nodes:
            frames = source_frames(node)
            own = [frame for frame in frames if not frame.file.startswith(TORCH_FOLDER)]
            if own and location(frames[-1]) == source:
                return location(own[-1])
    return ""


def _is_last_frame_ours(error: BaseException) -> bool:
    steps = list(_steps(error.__traceback__))
    return bool(steps) and steps[-1][0].startswith(FILE_PREFIX)


def _failing_lines(traceback: TracebackType | None) -> list[str]:
    """Return the generated lines on the way to an error of torch or of this package.

    Errors that a hook or a replaced module raises keep their message.
    """
    lines: list[str] = []
    is_ours = False
    for file, line in _steps(traceback):
        if file.startswith(FILE_PREFIX):
            lines.append(linecache.getline(file, line))
            is_ours = True
        elif not file.startswith(TORCH_FOLDER) and file not in _OURS:
            is_ours = False
    return lines if is_ours else []


def _steps(traceback: TracebackType | None) -> Iterator[tuple[str, int]]:
    while traceback is not None:
        yield traceback.tb_frame.f_code.co_filename, traceback.tb_lineno
        traceback = traceback.tb_next
