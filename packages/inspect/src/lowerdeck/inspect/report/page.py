"""One self-contained HTML page out of data, styles and scripts."""

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
    """Return an HTML page that shows ``data`` and asks nothing of the network.

    The page has a base that all our pictures share: elements that take names as text only, lists
    that hold only the rows one can see, tables that sort, graphs that one can move in, a search,
    and a style in light and dark. Other packages draw theirs on it.

    Args:
        data: What to draw; anything that JSON can say, except infinite numbers.
        title: Title of the page.
        script: JavaScript that defines ``showPage(data)``.
        style: CSS after that of the base.

    Returns:
        The text of the page, to be written as UTF-8. A content security policy in it admits only
        the style and the script in it, by their hashes.

    Raises:
        ValueError: ``data`` holds a number that is infinite or not a number.

    Example:
        >>> from lowerdeck.inspect import html_page
        >>> script = "function showPage(data) { document.body.append(data.greeting); }"
        >>> page = html_page({"greeting": "</script>"}, "Hello", script=script)
        >>> page.count("</script>")
        2
    """
    styles = "\n".join([_asset("report.css"), style])
    # In a separate block a script may call what it likes as the base does.
    parts = [*map(_asset, _BEFORE), "{", script, *map(_asset, _AFTER), "}"]
    whole = "\n".join(['"use strict";', "(() => {", *parts, "})();"])
    policy = "; ".join(
        [
            "default-src 'none'",
            "base-uri 'none'",
            "form-action 'none'",
            "img-src data:",
            f"style-src '{_digest(styles)}'",
            f"script-src '{_digest(whole)}'",
        ]
    )
    return Template(_asset("page.html")).substitute(
        policy=html.escape(policy),
        title=html.escape(printable(title)),
        style=styles,
        script=whole,
        data=json_for_page(data),
    )


def own_script() -> str:
    """Return the script that draws reports of files and differences between two."""
    return "\n".join(map(_asset, _OWN))


def _asset(name: str) -> str:
    # importlib.resources would do the same, but takes a tenth of this package's import time.
    return (get_data(__package__, f"assets/{name}") or b"").decode()


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
