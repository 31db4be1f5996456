"""Text from files as text for terminals: nothing that moves the cursor or cannot be encoded."""

from __future__ import annotations

import sys
from typing import TextIO


def printable(text: str) -> str:
    """Return ``text`` with escapes for whatever a terminal would obey or hide.

    Args:
        text: One line, perhaps with names from a file: line ends in it are escaped, too.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def show(text: str, stream: TextIO | None = None) -> None:
    """Print one line to a stream of whatever encoding.

    Args:
        text: The line; what the stream cannot encode is escaped.
        stream: The stream; standard output by default.
    """
    out = stream if stream is not None else sys.stdout
    encoding = out.encoding or "utf-8"
    print(printable(text).encode(encoding, "backslashreplace").decode(encoding), file=out)
