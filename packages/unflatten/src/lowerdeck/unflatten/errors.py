"""Errors that this package raises."""


class UnflattenError(Exception):
    """Base of every error that ``lowerdeck.unflatten`` raises on purpose."""


class UnsupportedProgramError(UnflattenError, ValueError):
    """The program has no module hierarchy or is inconsistent."""


class InputStructureError(UnflattenError, TypeError):
    """The pytree structure of the arguments differs from the exported one."""


class InputConstraintError(UnflattenError, RuntimeError):
    """An argument or a result differs from the recorded one in type, shape or value."""
