"""The errors that this package raises."""


class DemoBackendError(Exception):
    """Base of every error that ``lowerdeck.demo_backends`` raises on purpose."""
