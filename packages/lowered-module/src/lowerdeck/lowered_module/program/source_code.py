"""Where in the user's code a node comes from."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch.fx import Node

_TORCH = f"{Path(torch.__file__).parent}{os.sep}"


def source_of(node: Node) -> str:
    """Return the innermost place outside torch that made ``node``, and its line of code below.

    Torch's own place, such as ``Linear.forward``, is told only where there is no other; where
    nothing is known, the text is empty.

    Args:
        node: A node as ``torch.export`` makes it.
    """
    places: list[list[str]] = []
    for line in (node.meta.get("stack_trace") or "").splitlines():
        if line.lstrip().startswith('File "'):
            places.append([line])
        elif places and line.strip():
            places[-1].append(line)
    own = [place for place in places if _TORCH not in place[0]]
    return "\n".join((own or places or [[]])[-1])
