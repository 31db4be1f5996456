"""The errors that this package raises."""


class OpenvinoError(Exception):
    """Base of every error that ``lowerdeck.openvino`` raises on purpose."""


class DeviceError(OpenvinoError, ValueError):
    """OpenVINO has no such device on this machine."""


class BlobError(OpenvinoError, ValueError):
    """A delegate's payload is damaged, or was made by another version of OpenVINO."""


class DelegateInputError(OpenvinoError, ValueError):
    """A delegate was called with inputs that its payload was not compiled for."""


class DelegateRunError(OpenvinoError, RuntimeError):
    """A sound payload failed while it ran."""
