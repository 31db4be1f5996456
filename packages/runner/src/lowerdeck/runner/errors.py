"""The errors that this package raises."""


class RunnerError(Exception):
    """Base of every error that ``lowerdeck.runner`` raises on purpose."""
