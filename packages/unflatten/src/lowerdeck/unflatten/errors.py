"""Errors that this package raises."""


class UnflattenError(Exception):
    """Base of this package's errors, except ``KeyError`` and ``IndexError`` of child lookups."""


class UnsupportedProgramError(UnflattenError, ValueError):
    """The program or an option of a call is not supported."""


class InputStructureError(UnflattenError, TypeError):
    """The pytree structure of arguments or of a result differs from the exported one."""


class InputConstraintError(UnflattenError, RuntimeError):
    """An argument or a result differs from the recorded one in type, shape or value."""
