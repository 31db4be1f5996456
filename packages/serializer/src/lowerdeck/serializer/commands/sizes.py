"""Sizes as a person reads them."""

from __future__ import annotations

_UNITS = ("B", "kB", "MB", "GB", "TB")


def size_text(nbytes: int) -> str:
    """Return a size in decimal units, such as ``46.8 MB``.

    Args:
        nbytes: The size in bytes.
    """
    value = float(nbytes)
    for unit in _UNITS:
        if value < 1000 or unit == _UNITS[-1]:
            return f"{nbytes} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError("the last unit takes every size")  # pragma: no cover


def share_text(part: int, whole: int) -> str:
    """Return the share of ``part`` in ``whole`` in percent, such as ``99.1 %``.

    Args:
        part: Bytes of the part.
        whole: Bytes of the whole.
    """
    return f"{100 * part / whole:.1f} %" if whole else "0.0 %"
