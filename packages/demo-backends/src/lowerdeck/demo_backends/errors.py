"""The errors that this package raises."""


class DemoBackendError(Exception):
    """Base of every error that ``lowerdeck.demo_backends`` raises on purpose."""


class BlobError(DemoBackendError, ValueError):
    """A delegate's blob is truncated, damaged, hostile or of another version."""


class DelegateInputError(DemoBackendError, ValueError):
    """A delegate was called with inputs that its blob was not compiled for."""


class DelegateRunError(DemoBackendError, RuntimeError):
    """A sound blob failed while it ran, for instance for want of memory."""
