"""Source lines and modules of nodes."""

from __future__ import annotations

import os
import re
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch.fx import Node

_TORCH = f"{Path(torch.__file__).parent}{os.sep}"

# Python's format of a frame: the location, then an optional indented line of code.
_FRAME = re.compile(
    r'^[ \t]*File "(?P<file>[^"\n]*)", line (?P<line>\d+), in (?P<function>[^\n]*)'
    r'(?:\n(?![ \t]*File ")[ \t]+(?P<code>[^\n]*))?',
    re.MULTILINE,
)


class SourceFrame(NamedTuple):
    """Frame of a node's recorded stack trace.

    Attributes:
        line: Line number, from 1.
        code: The source line, or "".
    """

    file: str
    line: int
    function: str
    code: str

    @property
    def location(self) -> str:
        """File, line and function in traceback format."""
        return f'File "{self.file}", line {self.line}, in {self.function}'


def source_frames(node: Node) -> tuple[SourceFrame, ...]:
    """Return the recorded frames of a node, outermost first; empty if unknown.

    Args:
        node: Any node; invalid metadata counts as unknown.

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


# Many nodes have the same trace.
@lru_cache(maxsize=4096)
def _frames(trace: str) -> tuple[SourceFrame, ...]:
    return tuple(
        SourceFrame(
            match["file"], int(match["line"]), match["function"], (match["code"] or "").strip()
        )
        for match in _FRAME.finditer(trace)
    )


def source_frame(node: Node) -> SourceFrame | None:
    """Return the innermost frame of a node outside of torch, or None if unknown.

    If all frames are in torch, such as ``Linear.forward``, return the innermost.
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
