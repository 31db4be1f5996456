"""Errors of this package."""


class DemoBackendError(Exception):
    """Base of all errors of ``lowerdeck.demo_backends``."""


class BlobError(DemoBackendError, ValueError):
    """A delegate's blob is truncated, corrupt, malicious or of another version."""


class DelegateInputError(DemoBackendError, ValueError):
    """The inputs of a call do not match those that the blob was compiled for."""


class DelegateRunError(DemoBackendError, RuntimeError):
    """A valid blob failed at run time, for instance out of memory."""
