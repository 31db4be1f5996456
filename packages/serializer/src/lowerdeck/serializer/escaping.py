"""Convert text from a file to text that is safe to print on any terminal."""

from __future__ import annotations

import unicodedata

# Control characters send commands to the terminal; format characters reorder text or have no
# width; surrogates, private and unassigned characters have no defined glyph; line separators break
# the line.
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
_LONGEST = 200


def printable(text: str) -> str:
    r"""Return the text with all unprintable or invisible characters escaped.

    Args:
        text: Any text, such as a name from a file.

    Returns:
        The text, with control, format (including bidirectional), surrogate, private and unassigned
        characters and line separators as ``\xNN``, ``\uNNNN`` or ``\UNNNNNNNN``.

    Example:
        >>> print(printable("weight\x1b[2J"), printable("naïve"))
        weight\x1b[2J naïve
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escaped(letter) if _is_hidden(letter) else letter for letter in text)


def quoted(text: str) -> str:
    """Return a name from a file, quoted, escaped and truncated, for an error message."""
    if len(text) > _LONGEST:
        half = _LONGEST // 2
        text = f"{text[:half]} ... {text[-half:]}"
    return "'" + printable(text).replace("'", "\\'") + "'"


def shown(value: object) -> str:
    """Return a value with its type, escaped and truncated, for an error message."""
    kind = type(value).__name__
    if isinstance(value, str):
        return f"{quoted(value)} ({kind})"
    try:
        text = printable(repr(value))
    except ValueError:
        # Python refuses to print a number of more than 4,300 digits.
        text = "a number with thousands of digits"
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({kind})"


def _is_hidden(letter: str) -> bool:
    return unicodedata.category(letter) in _HIDDEN


def _escaped(letter: str) -> str:
    number = ord(letter)
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
