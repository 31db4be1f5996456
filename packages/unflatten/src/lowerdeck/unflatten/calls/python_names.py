"""Which texts may be in generated code as names, and how any other text is shown there.

A program read from a file names modules, arguments and source lines as it likes.
"""

from __future__ import annotations

import keyword
import unicodedata


def is_name(text: object) -> bool:
    """Return whether Python source can spell ``text`` as a name and means that very text by it.

    The parser takes other spellings of a letter for the letter (``µ`` for ``μ``), which would read
    another attribute; nothing can be bound to ``__debug__``.
    """
    return (
        type(text) is str
        and text.isidentifier()
        and not keyword.iskeyword(text)
        and text != "__debug__"
        and (text.isascii() or unicodedata.normalize("NFKC", text) == text)
    )


def on_one_line(text: str) -> str:
    """Return ``text`` with escapes for what ends a line, cannot be seen or turns text round."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )
