"""The errors that this package raises."""


class UnflattenError(Exception):
    """Base of every error that ``lowerdeck.unflatten`` raises on purpose."""
