"""Read where in the user's code a node comes from."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import fx

from lowerdeck.serializer import Frame, FrameList

_TORCH = f"{Path(torch.__file__).parent}{os.sep}"


def source_line(node: fx.Node) -> str:
    """Return the innermost line outside torch that made ``node``, "" when unknown.

    Torch's own line, such as that of ``Linear.forward``, is told only where there is no other.
    """
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
    places = [line for line in lines if line.startswith("File ")]
    own = [place for place in places if _TORCH not in place]
    return (own or places or [""])[-1]


def module_path(node: fx.Node) -> str:
    """Return the path of the module that ``node`` belongs to, "" for the root."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = list(stack.values())[-1][0]
    return str(path).removeprefix("L['self'].").removeprefix("L['self']")


def stack_frames(origin: fx.Node | None) -> FrameList:
    """Return the stack trace of a node as the file format has it, outermost frame first."""
    trace = (origin.meta.get("stack_trace") or "") if origin is not None else ""
    frames: list[Frame] = []
    lines = trace.splitlines()
    for index, line in enumerate(lines):
        text = line.strip()
        if not text.startswith('File "'):
            continue
        file, _, rest = text.removeprefix('File "').partition('", line ')
        number, _, function = rest.partition(", in ")
        following = lines[index + 1].strip() if index + 1 < len(lines) else ""
        context = "" if following.startswith('File "') else following
        lineno = int(number) if number.isdigit() else 0
        frames.append(Frame(file, lineno, function, context))
    return FrameList(frames)
