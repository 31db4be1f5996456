"""Errors of this package."""

from __future__ import annotations


class DecomposeError(Exception):
    """A program, or a table of decompositions, that this package cannot take."""


class WholeProgramError(DecomposeError):
    """What cannot be told call by call, so that torch has to trace the whole program.

    ``decompose`` catches it and goes torch's own way; ``explain`` tells the reason.
    """


class TemplateError(WholeProgramError):
    """A call that fails where it is traced by itself: torch may fail on it too."""
