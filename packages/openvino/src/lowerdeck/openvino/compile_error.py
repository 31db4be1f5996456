"""The error of compiling, apart from the others: what it derives from imports torch."""

from lowerdeck.lowered_module import UnsupportedOperatorError
from lowerdeck.openvino.errors import OpenvinoError


class CompileError(OpenvinoError, UnsupportedOperatorError):
    """OpenVINO refuses a partition; the message says which operator, or what the compiler said."""
