"""Errors of this package."""

from lowerdeck.lowered_module import UnsupportedOperatorError


class XnnpackError(Exception):
    """Base class of the errors of ``lowerdeck.xnnpack``."""


class UnsupportedNodeError(XnnpackError, UnsupportedOperatorError):
    """XNNPACK cannot compute a node as torch does; the message names operator, node and source."""


class QuantizationError(UnsupportedNodeError, ValueError):
    """Scales or zero points are invalid; the message names operator, node and source."""


class BlobError(XnnpackError, ValueError):
    """A delegate's payload is truncated, corrupt, malicious or of another version."""


class DelegateInputError(XnnpackError, ValueError):
    """The inputs of a call do not match those that the payload was compiled for."""


class DelegateRunError(XnnpackError, RuntimeError):
    """A valid payload failed at run time, for instance for lack of memory."""
