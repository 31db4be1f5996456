"""Source lines and modules of the user's model that nodes come from."""

from __future__ import annotations

import os
import re
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch.fx import Node

_TORCH = f"{Path(torch.__file__).parent}{os.sep}"

# As Python prints a frame: its location, and below it, indented, the line of code if it is known.
_FRAME = re.compile(
    r'^[ \t]*File "(?P<file>[^"\n]*)", line (?P<line>\d+), in (?P<function>[^\n]*)'
    r'(?:\n(?![ \t]*File ")[ \t]+(?P<code>[^\n]*))?',
    re.MULTILINE,
)


class SourceFrame(NamedTuple):
    """One frame of the stack that was recorded when a node was traced.

    Attributes:
        file: Path of the source file.
        line: Number of the line, from 1.
        function: Name of the function.
        code: The line itself, "" when unknown.
    """

    file: str
    line: int
    function: str
    code: str

    @property
    def location(self) -> str:
        """File, line and function, as Python prints them in a traceback."""
        return f'File "{self.file}", line {self.line}, in {self.function}'


def source_frames(node: Node) -> tuple[SourceFrame, ...]:
    """Return the frames recorded for a node, outermost first; none where nothing is known.

    Args:
        node: Any node, from a file too: nothing is raised for invalid metadata.

    Example:
        >>> import torch
        >>> from lowerdeck.torch_base import source_frames
        >>> node = torch.fx.Graph().call_function(torch.relu)
        >>> node.meta["stack_trace"] = '  File "model.py", line 7, in forward'
        >>> source_frames(node)
        (SourceFrame(file='model.py', line=7, function='forward', code=''),)
    """
    trace = node.meta.get("stack_trace")
    return _frames(trace) if type(trace) is str else ()


# Neighbouring nodes come from one line, and a layer that is called often from few.
@lru_cache(maxsize=4096)
def _frames(trace: str) -> tuple[SourceFrame, ...]:
    return tuple(
        SourceFrame(
            match["file"], int(match["line"]), match["function"], (match["code"] or "").strip()
        )
        for match in _FRAME.finditer(trace)
    )


def source_frame(node: Node) -> SourceFrame | None:
    """Return the innermost frame outside torch that made a node, None where nothing is known.

    If all frames are of torch, such as that of ``Linear.forward``, it is the innermost of them.
    """
    frames = source_frames(node)
    own = [frame for frame in frames if not frame.file.startswith(_TORCH)]
    return (own or frames or (None,))[-1]


def module_path(node: Node) -> str:
    """Return the path of a node's module, such as ``layers.0``; "" for the root."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = list(stack.values())[-1][0]
    return str(path).removeprefix("L['self'].").removeprefix("L['self']")


def describe_node(node: Node) -> str:
    """Return a node's operator, name and source line, for an error message."""
    frame = source_frame(node)
    location = f"{frame.file}:{frame.line}" if frame else "an unknown line"
    return f"{node.target} (node {node.name!r}, from {location})"
