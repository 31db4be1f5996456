"""Errors of this package."""


class OpenvinoError(Exception):
    """Base of all errors of ``lowerdeck.openvino``."""


class DeviceError(OpenvinoError, ValueError):
    """The device is not available on this machine."""


class BlobError(OpenvinoError, ValueError):
    """A delegate's payload is damaged, or was compiled by another version of OpenVINO."""


class DelegateInputError(OpenvinoError, ValueError):
    """The inputs of a call do not match the payload's."""


class DelegateRunError(OpenvinoError, RuntimeError):
    """An intact payload failed at run time."""
