"""HTML pages about one file, or about two side by side."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from lowerdeck.inspect.report.changes import method_changes, stored_changes
from lowerdeck.inspect.report.delegates import DelegateEntries
from lowerdeck.inspect.report.embed import Interned, clip
from lowerdeck.inspect.report.file_map import Placement, placement_of, sections_entry, stored_entry
from lowerdeck.inspect.report.methods import method_entry
from lowerdeck.inspect.report.page import html_page, own_script
from lowerdeck.inspect.report.trace import Watched, watched_by
from lowerdeck.serializer import Frame, Program, PteFile


def html_report(
    source: PteFile | Program, *, title: str = "program", trace: str | None = None
) -> str:
    """Return a page that shows a program's methods, memory over time, operators and delegates.

    Args:
        source: An open file, or a program, for which the page has no file map.
        title: Title of the page.
        trace: Timings of one call, as JSON from lowerdeck-runner's ``Profile.chrome_trace``; the
            page shows the time and module of each instruction.

    Returns:
        One self-contained HTML page, to be written as UTF-8. Names from the file are inserted as
        text, never as markup.

    Raises:
        FormatError: The file is malformed.
        TraceError: The trace is invalid, or belongs to another program.

    Example:
        >>> from lowerdeck.serializer import ExecutionPlan, Program
        >>> from lowerdeck.inspect import html_report
        >>> text = html_report(Program(execution_plan=[ExecutionPlan("forward")]))
        >>> text.startswith("<!doctype html>")
        True
    """
    program, placement = _parts(source)
    watched = watched_by(trace, program) if trace is not None else {}
    data = {"mode": "report", "file": file_entry(program, placement, title, watched)}
    return html_page(data, title, script=own_script())


def html_diff(
    old: PteFile | Program,
    new: PteFile | Program,
    *,
    titles: tuple[str, str] = ("old", "new"),
    traces: tuple[str, str] | None = None,
) -> str:
    """Return a page that shows two programs side by side.

    Args:
        old: The file or program on the left.
        new: The file or program on the right.
        titles: Titles of the programs.
        traces: A trace of each program for the same inputs, as for :func:`html_report`; the page
            shows the error of the new program's results relative to the old one's.

    Returns:
        One HTML page, as from :func:`html_report`.

    Raises:
        FormatError: A file is malformed.
        TraceError: A trace is invalid, or belongs to another program.
    """
    left, right = _parts(old), _parts(new)
    watched = [
        watched_by(trace, program) if trace is not None else {}
        for (program, _), trace in zip((left, right), traces or (None, None), strict=True)
    ]
    data = {
        "mode": "diff",
        "old": file_entry(*left, titles[0], watched[0]),
        "new": file_entry(*right, titles[1], watched[1]),
        "methods": method_changes(left[0], right[0]),
        "stored": stored_changes(left[0], right[0]),
    }
    return html_page(data, " → ".join(titles), script=own_script())


def _parts(source: PteFile | Program) -> tuple[Program, Placement | None]:
    if isinstance(source, Program):
        return source, None
    return source.program(), placement_of(source)


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
