"""Create a self-contained HTML page from data, styles and scripts."""

from __future__ import annotations

import base64
import hashlib
import html
from pkgutil import get_data
from string import Template
from typing import Any

from lowerdeck.inspect.report.embed import json_for_page
from lowerdeck.serializer import printable

_BEFORE = (
    "elements.js",
    "format.js",
    "search.js",
    "virtual_list.js",
    "tables.js",
    "graph_layout.js",
    "graph_view.js",
)
_AFTER = ("start.js",)
_OWN = (
    "model.js",
    "covered_length.js",
    "memory.js",
    "outline.js",
    "instructions.js",
    "instruction_graph.js",
    "file_map.js",
    "report.js",
    "diff.js",
    "show.js",
)


def html_page(data: dict[str, Any], title: str, *, script: str, style: str = "") -> str:
    """Return a self-contained HTML page that shows ``data``.

    The page includes a JavaScript library, which other packages may use: elements with text
    content only, virtualized lists, sortable tables, zoomable graphs, a search, and light and dark
    styles.

    Args:
        data: JSON-compatible data without infinities and NaN.
        title: Title of the page.
        script: JavaScript that defines ``showPage(data)``.
        style: CSS, appended to the style of the library.

    Returns:
        The page, to be written as UTF-8. Its content security policy admits only the style and
        script of the page, by hash.

    Raises:
        ValueError: ``data`` contains an infinite number or NaN.

    Example:
        >>> from lowerdeck.inspect import html_page
        >>> script = "function showPage(data) { document.body.append(data.greeting); }"
        >>> page = html_page({"greeting": "</script>"}, "Hello", script=script)
        >>> page.count("</script>")
        2
    """
    styles = "\n".join([_asset("report.css"), style])
    # A separate block, so that the script's names cannot conflict with the base's.
    parts = [*map(_asset, _BEFORE), "{", script, *map(_asset, _AFTER), "}"]
    whole_script = "\n".join(['"use strict";', "(() => {", *parts, "})();"])
    policy = "; ".join(
        [
            "default-src 'none'",
            "base-uri 'none'",
            "form-action 'none'",
            "img-src data:",
            f"style-src '{_digest(styles)}'",
            f"script-src '{_digest(whole_script)}'",
        ]
    )
    return Template(_asset("page.html")).substitute(
        policy=html.escape(policy),
        title=html.escape(printable(title)),
        style=styles,
        script=whole_script,
        data=json_for_page(data),
    )


def own_script() -> str:
    """Return the script that draws the reports of one file and of two files."""
    return "\n".join(map(_asset, _OWN))


def _asset(name: str) -> str:
    # importlib.resources is equivalent, but its import is slow.
    return (get_data(__package__, f"assets/{name}") or b"").decode()


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
