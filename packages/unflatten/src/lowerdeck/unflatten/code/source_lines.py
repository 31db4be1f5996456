"""The line of the model's own source that a node comes from."""

from __future__ import annotations

import re
from functools import lru_cache

from torch.fx import Node

from lowerdeck.unflatten.calls.python_names import on_one_line

_FRAME = re.compile(
    r'File "(?P<file>[^"\n]+)", line (?P<line>\d+), in (?P<name>\S+)\n[ \t]+(?P<code>[^\n]+)'
)


def source_comment(node: Node) -> str:
    """Return ``file:line in function: code`` for a node's innermost frame, or ``""``.

    Whatever the trace says, it is one line.
    """
    trace = node.meta.get("stack_trace")
    return _comment(trace) if type(trace) is str else ""


@lru_cache(maxsize=4096)
def _comment(trace: str) -> str:
    frames = list(_FRAME.finditer(trace))
    if not frames:
        return ""
    last = frames[-1]
    return on_one_line(f"{last['file']}:{last['line']} in {last['name']}: {last['code'].strip()}")
