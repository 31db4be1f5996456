"""The errors that this package raises."""

from lowerdeck.lowered_module import UnsupportedOperatorError


class OpenvinoError(Exception):
    """Base of every error that ``lowerdeck.openvino`` raises on purpose."""


class CompileError(OpenvinoError, UnsupportedOperatorError):
    """OpenVINO refuses a partition; the message says which operator, or what the compiler said."""


class DeviceError(OpenvinoError, ValueError):
    """OpenVINO has no such device on this machine."""


class BlobError(OpenvinoError, ValueError):
    """A delegate's payload is damaged, or was made by another version of OpenVINO."""


class DelegateInputError(OpenvinoError, ValueError):
    """A delegate was called with inputs that its payload was not compiled for."""


class DelegateRunError(OpenvinoError, RuntimeError):
    """A sound payload failed while it ran."""
