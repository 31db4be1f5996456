"""What operator of the model failed: said in the error's own message."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.fx import Graph

from lowerdeck.torch_base import SourceFrame, source_frames
from lowerdeck.unflatten._torch_private import children_of
from lowerdeck.unflatten.calls import channel, chosen_forms
from lowerdeck.unflatten.calls.carrying import PRIVATE
from lowerdeck.unflatten.calls.former_calls import say_how_it_was_called
from lowerdeck.unflatten.calls.other_arguments import say_what_was_recorded
from lowerdeck.unflatten.calls.python_names import on_one_line
from lowerdeck.unflatten.code.call_targets import split_call_target
from lowerdeck.unflatten.errors import UnflattenError

FILE_PREFIX = "<lowerdeck.unflatten "
"""What the names of generated files begin with."""

NAME_SOURCE = "_lowerdeck_name_source"
"""The global name under which compiled functions find ``name_source``."""

TORCH_FOLDER = str(Path(torch.__file__).parent)
"""Where torch's own lines are; lines of its layers say little of the model."""

_BETWEEN = {chosen_forms.__file__, channel.__file__}
"""Between the code of a caller and the form of a module that it calls."""

_TOLD = "_lowerdeck_message"
"""Attribute of an error that holds its message as it was raised."""


def naming(text: str) -> str:
    """Return a function with what names the line of the model in its errors, as they pass.

    It is around the lines, which stay as they are: it costs nothing until one fails.

    Args:
        text: The source; its first line is all of its head.
    """
    head, _, body = text.rstrip("\n").partition("\n")
    return f"{head}\n    try:\n    " + body.replace("\n", "\n    ") + _NAMED


_NAMED = f"""
    except Exception:
        {NAME_SOURCE}(self)
        raise
"""


def name_source(module: torch.nn.Module) -> None:
    """Add to the message of the error that is handled the line of the model that failed, in place.

    An error whose message is no text, or that names a line already, stays as it is.

    Args:
        module: The module whose generated code the error leaves.

    Raises:
        UnflattenError: The code calls a child, or reads what a child holds, that is not there, or
            that takes other values than the program has for it.
    """
    # Asked for here: a name for it in each function would cost a tenth of compiling that.
    error = None if torch.compiler.is_compiling() else sys.exception()
    if error is None:
        return
    say_what_was_recorded(error)
    if isinstance(error, (AttributeError, KeyError, TypeError)):
        _say_what_is_missing(error, module)
    say_how_it_was_called(error, module, _called_paths(module))
    if len(error.args) != 1:
        return
    message = getattr(error, _TOLD, error.args[0])
    if not isinstance(message, str):
        return
    failing = [line.strip().partition("  # ") for line in _failing_lines(error.__traceback__)]
    if not failing:
        return
    code, _, source = failing[-1]
    if not source or source in message:
        return
    around = [found for _, _, found in failing if found and not found.startswith(TORCH_FOLDER)]
    caller = ""
    if source.startswith(TORCH_FOLDER):
        caller = around[-1] if around else _caller_of(module, source)
    called = f", called by {caller}" if caller else ""
    error.__dict__[_TOLD] = message
    error.args = (f"{message}\n(in {code!r}, which is {source}{called})",)


@lru_cache(4096)
def told(frame: SourceFrame) -> str:
    """Return where a frame is in the model, on one line."""
    return on_one_line(f"{frame.file}:{frame.line} in {frame.function}: {frame.code}")


def _caller_of(module: torch.nn.Module, source: str) -> str:
    """Return the model's line from which a layer of torch's was called, "" if it is not known.

    Comments do not say it: layers that compute the same share their code.
    """
    body = module.__dict__[PRIVATE]
    for form in (body, *body.others):
        for node in form.graph.nodes:
            frames = source_frames(node)
            own = [one for one in frames if not one.file.startswith(TORCH_FOLDER)]
            if own and told(frames[-1]) == source:
                return told(own[-1])
    return ""


def _called_paths(module: torch.nn.Module) -> Iterator[str]:
    """Yield the children that a module calls, by the names that its code has for them."""
    body = module.__dict__[PRIVATE]
    graphs: list[Graph] = [form.graph for form in (body, *body.others)]
    nodes = [node for graph in graphs for node in graph.find_nodes(op="call_module")]
    yield from dict.fromkeys(split_call_target(str(node.target))[0] for node in nodes)


def _say_what_is_missing(error: BaseException, module: torch.nn.Module) -> None:
    """Raise an error that names what the code of ``module`` calls or reads and which is gone."""
    lines = _failing_lines(error.__traceback__)
    if len(lines) != 1:
        # Not in this module's own code.
        return
    body = module.__dict__[PRIVATE]
    graphs: list[Graph] = [form.graph for form in (body, *body.others)]
    for path in _called_paths(module):
        held: torch.nn.Module | None = module
        for name in path.split("."):
            held = None if held is None else children_of(held).get(name)
        if held is None:
            raise UnflattenError(
                f"This module calls its child {path!r}, but no module is there: it was deleted or "
                "set to None, or what held it was replaced by a module without such a child. Put "
                "a module there: an Identity to compute nothing, one that calls it for a function."
            ) from error
    reads = [str(node.target) for graph in graphs for node in graph.find_nodes(op="get_attr")]
    for path in dict.fromkeys(reads):
        _say_what_state_is_missing(error, module, path)


def _say_what_state_is_missing(error: BaseException, module: torch.nn.Module, path: str) -> None:
    """Raise an error if ``module`` reads ``path`` and another module is there without it."""
    held: Any = module
    name = ""
    *outer, attribute = path.split(".")
    for part in outer:
        found = children_of(held).get(part) if isinstance(held, torch.nn.Module) else None
        if found is None:
            attribute = part
            break
        held, name = found, f"{name}.{part}" if name else part
    if name and not hasattr(held, attribute):
        raise UnflattenError(
            f"This module reads or writes {path!r} itself, but a {type(held).__name__} is there "
            f"as {name!r}, which has no {attribute!r}. Put a module there that has it and uses it "
            "as the module that was recorded did (one that wraps that module can hand it on as an "
            "attribute or property of its own), or export the model with the other module in it."
        ) from error


def _failing_lines(traceback: TracebackType | None) -> list[str]:
    """Return the lines of generated code on the way to what failed, if that was torch itself.

    What a hook or a module in the place of ours raises is its own affair.
    """
    found: list[str] = []
    is_ours = False
    for file, line in _steps(traceback):
        if file.startswith(FILE_PREFIX):
            found.append(linecache.getline(file, line))
            is_ours = True
        elif not file.startswith(TORCH_FOLDER) and file not in _BETWEEN:
            is_ours = False
    return found if is_ours else []


def _steps(traceback: TracebackType | None) -> Iterator[tuple[str, int]]:
    while traceback is not None:
        yield traceback.tb_frame.f_code.co_filename, traceback.tb_lineno
        traceback = traceback.tb_next
