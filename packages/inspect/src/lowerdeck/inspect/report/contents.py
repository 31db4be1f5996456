"""The data of a page about one file."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from lowerdeck.inspect.report.delegates import DelegateEntries
from lowerdeck.inspect.report.embed import Interned, clip
from lowerdeck.inspect.report.file_map import Placement, sections_entry, stored_entry
from lowerdeck.inspect.report.methods import method_entry
from lowerdeck.inspect.report.trace import Watched
from lowerdeck.serializer import Frame, Program


def file_entry(
    program: Program,
    placement: Placement | None,
    title: str,
    watched: Watched = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the page data of one program.

    Args:
        placement: Offsets of the program's parts in its file, None without a file.
        title: Title of the program.
        watched: Times of calls from a trace.
    """
    texts, frames = Interned[str](), Interned[Frame]()
    delegates = DelegateEntries(program, texts)
    methods = [
        method_entry(plan, delegates, texts, frames, watched) for plan in program.execution_plan
    ]
    return {
        "title": title,
        "size": placement.file_size if placement is not None else None,
        "methods": methods,
        "texts": texts.items,
        "frames": [
            [clip(frame.filename), frame.lineno, clip(frame.name), clip(frame.context)]
            for frame in frames.items
        ],
        "sections": sections_entry(placement) if placement is not None else [],
        "stored": stored_entry(program, placement),
    }
