"""The errors that this package raises."""


class EmitterError(Exception):
    """Base of every error that ``lowerdeck.emitter`` raises on purpose."""
