"""The errors that this package raises."""

from lowerdeck.lowered_module import UnsupportedOperatorError


class XnnpackError(Exception):
    """Base of every error that ``lowerdeck.xnnpack`` raises on purpose."""


class UnsupportedNodeError(XnnpackError, UnsupportedOperatorError):
    """XNNPACK cannot compute a node as torch does; the message names op, node and source."""


class QuantizationError(UnsupportedNodeError, ValueError):
    """Scales or zero points of a program make no sense; the message names op, node and source."""


class BlobError(XnnpackError, ValueError):
    """A delegate's payload is truncated, damaged, hostile or of another version."""


class DelegateInputError(XnnpackError, ValueError):
    """A delegate was called with inputs that its payload was not compiled for."""


class DelegateRunError(XnnpackError, RuntimeError):
    """A sound payload failed while it ran, for instance for want of memory."""
