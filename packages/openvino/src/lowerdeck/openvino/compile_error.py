"""Compile-time error, in a separate module because its base class imports torch."""

from lowerdeck.lowered_module import UnsupportedOperatorError
from lowerdeck.openvino.errors import OpenvinoError


class CompileError(OpenvinoError, UnsupportedOperatorError):
    """OpenVINO cannot compile a partition."""
