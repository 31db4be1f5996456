"""Where in the user's source a node came from."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch.fx import Node

_TORCH = f"{Path(torch.__file__).parent}{os.sep}"


def source_line(node: Node) -> str:
    """Return the innermost line outside torch that made a node, as ``file.py:12``.

    Args:
        node: Any node.

    Returns:
        The file and the line from the recorded stack, or ``"an unknown line"``.
    """
    frames = [line for line in (node.stack_trace or "").splitlines() if 'File "' in line]
    if not frames:
        return "an unknown line"
    own = [line for line in frames if _TORCH not in line]
    file, _, rest = (own or frames)[-1].partition('File "')[2].partition('", line ')
    return f"{file}:{rest.split(',')[0].strip()}"


def describe_node(node: Node) -> str:
    """Return a node's operator, name and source line, for an error message.

    Args:
        node: Any node.
    """
    return f"{node.target} (node {node.name!r}, from {source_line(node)})"
