"""Errors of this package."""

from __future__ import annotations


class DecomposeError(Exception):
    """Invalid argument, or a program that cannot be decomposed."""


class WholeProgramError(DecomposeError):
    """Reason for the fallback to ``run_decompositions``.

    ``decompose`` catches it; ``explain`` returns its message.
    """


class TemplateError(WholeProgramError):
    """Exception in the trace of a call; ``run_decompositions`` may fail as well."""
