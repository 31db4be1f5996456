"""Errors that this package raises."""


class UnflattenError(Exception):
    """Base of every error that ``lowerdeck.unflatten`` raises on purpose."""


class UnsupportedProgramError(UnflattenError, ValueError):
    """The program has no module hierarchy, or its parts disagree."""


class InputStructureError(UnflattenError, TypeError):
    """The containers of an argument differ from the exported ones."""


class InputConstraintError(UnflattenError, RuntimeError):
    """An argument or a result differs from the recorded one in type, shape or value."""
