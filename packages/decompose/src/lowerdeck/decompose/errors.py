"""Errors of this package."""

from __future__ import annotations


class DecomposeError(Exception):
    """Invalid argument, or a program that cannot be decomposed."""


class WholeProgramError(DecomposeError):
    """Reason to decompose a program by ``run_decompositions`` instead of call by call.

    ``decompose`` catches it; ``explain`` returns its message.
    """


class TemplateError(WholeProgramError):
    """Failure of a call that is traced alone: ``run_decompositions`` may fail as well."""
