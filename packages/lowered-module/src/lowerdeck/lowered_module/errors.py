"""The errors that this package raises."""


class LoweringError(Exception):
    """Base of every error that ``lowerdeck.lowered_module`` raises on purpose."""
