"""The pages: one file by itself, or two side by side."""

from __future__ import annotations

from lowerdeck.serializer.report.changes import method_changes, stored_changes
from lowerdeck.serializer.report.contents import file_entry
from lowerdeck.serializer.report.page import page
from lowerdeck.serializer.schema import Program


def html_report(program: Program, *, title: str | None = None) -> str:
    """Return a page that shows a program: methods, memory over time, operators, delegates, bytes.

    Args:
        program: The program.
        title: What to call it.

    Returns:
        The text of one HTML page, to be written as UTF-8. It holds all it needs, asks nothing of
        the network, and shows names from the file as text whatever they contain.
    """
    name = title or "a program"
    return page({"mode": "report", "file": file_entry(program, None, name)}, name)


def html_diff(old: Program, new: Program, *, titles: tuple[str, str] = ("old", "new")) -> str:
    """Return a page that shows two programs side by side.

    Args:
        old: The program on the left.
        new: The program on the right.
        titles: What to call them.

    Returns:
        The text of one HTML page, as :func:`html_report` gives.
    """
    data = {
        "mode": "diff",
        "old": file_entry(old, None, titles[0]),
        "new": file_entry(new, None, titles[1]),
        "methods": method_changes(old, new),
        "stored": stored_changes(old, new),
    }
    return page(data, " → ".join(titles))
