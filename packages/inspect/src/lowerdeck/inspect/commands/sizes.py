"""Human-readable sizes."""

from __future__ import annotations

_UNITS = ("kB", "MB", "GB", "TB")


def size_text(nbytes: int) -> str:
    """Return a size in decimal units, such as ``46.8 MB``.

    Args:
        nbytes: The size in bytes.
    """
    if nbytes < 1000:
        return f"{nbytes} B"
    value, unit = nbytes / 1000, 0
    while value >= 1000 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.1f} {_UNITS[unit]}"


def share_text(part: int, whole: int) -> str:
    """Return the percentage of ``part`` in ``whole``, such as ``99.1 %``.

    Args:
        part: Bytes of the part.
        whole: Bytes of the whole.
    """
    return f"{100 * part / whole:.1f} %" if whole else "0.0 %"
