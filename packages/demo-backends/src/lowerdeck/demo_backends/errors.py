"""The errors that this package raises."""

from lowerdeck.lowered_module import UnsupportedOperatorError


class DemoBackendError(Exception):
    """Base of every error that ``lowerdeck.demo_backends`` raises on purpose."""


class UnsupportedNodeError(DemoBackendError, UnsupportedOperatorError):
    """A backend was given a node that it cannot compile; the message names op, node and source."""


class BlobError(DemoBackendError, ValueError):
    """A delegate's blob is truncated, damaged, hostile or of another version."""


class DelegateInputError(DemoBackendError, ValueError):
    """A delegate was called with inputs that its blob was not compiled for."""


class DelegateRunError(DemoBackendError, RuntimeError):
    """A sound blob failed while it ran, for instance for want of memory."""
