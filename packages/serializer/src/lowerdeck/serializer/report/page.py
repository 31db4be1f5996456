"""One self-contained HTML page out of data, styles and scripts."""

from __future__ import annotations

import base64
import hashlib
import html
from importlib.resources import files
from string import Template
from typing import Any

from lowerdeck.serializer.report.embed import json_for_page

_ASSETS = files(__package__).joinpath("assets")
_SCRIPTS = (
    "elements.js",
    "format.js",
    "model.js",
    "virtual_list.js",
    "tables.js",
    "memory.js",
    "instructions.js",
    "file_map.js",
    "report.js",
    "diff.js",
    "start.js",
)


def page(data: dict[str, Any], title: str) -> str:
    """Return an HTML page that shows ``data`` and asks nothing of the network.

    Args:
        data: What the scripts of this package draw; see :mod:`.contents`.
        title: Title of the page.

    Returns:
        The text of the page. A content security policy in it admits only the style and the
        script that stand in it, by their hashes.
    """
    style = _asset("report.css")
    script = "\n".join(
        ['"use strict";', "(() => {", *(_asset(name) for name in _SCRIPTS), "})();"]
    )
    policy = "; ".join(
        [
            "default-src 'none'",
            "base-uri 'none'",
            "form-action 'none'",
            "img-src data:",
            f"style-src '{_digest(style)}'",
            f"script-src '{_digest(script)}'",
        ]
    )
    return Template(_asset("page.html")).substitute(
        policy=html.escape(policy),
        title=html.escape(title.encode(errors="replace").decode()),
        style=style,
        script=script,
        data=json_for_page(data),
    )


def _asset(name: str) -> str:
    return _ASSETS.joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
