"""The errors that this package raises."""


class UnflattenError(Exception):
    """Base of every error that ``lowerdeck.unflatten`` raises on purpose."""


class UnsupportedProgramError(UnflattenError, ValueError):
    """The program is of a kind that has no module hierarchy, or its parts disagree."""


class InputStructureError(UnflattenError, TypeError):
    """An argument's containers differ from those that the program was exported with."""


class InputConstraintError(UnflattenError, RuntimeError):
    """An argument's type, shape or value is outside of what the program was exported for."""
