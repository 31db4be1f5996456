"""The line of the model's own source that a node comes from."""

from __future__ import annotations

import re
from functools import lru_cache

from torch.fx import Node

_FRAME = re.compile(
    r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>\S+)\n\s+(?P<code>[^\n]+)'
)


def source_comment(node: Node) -> str:
    """Return ``file:line in function: code`` for a node's innermost frame, or ``""``."""
    trace = node.meta.get("stack_trace")
    return _comment(trace) if trace else ""


@lru_cache(maxsize=4096)
def _comment(trace: str) -> str:
    frames = list(_FRAME.finditer(trace))
    if not frames:
        return ""
    last = frames[-1]
    return f"{last['file']}:{last['line']} in {last['name']}: {last['code'].strip()}"
