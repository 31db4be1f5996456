"""Compile programs with OpenVINO for the official runtime's delegate, and run the payloads.

The compiler and the runtime are imported lazily. Importing this package registers neither, so that
ExecuTorch's backend of the same id stays available in the process.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lowerdeck.openvino.errors import (
    BlobError,
    DelegateInputError,
    DelegateRunError,
    DeviceError,
    OpenvinoError,
)

if TYPE_CHECKING:
    from lowerdeck.openvino.backend import OpenvinoBackend, OpenvinoPartitioner
    from lowerdeck.openvino.compile_error import CompileError
    from lowerdeck.openvino.payload import decode_payload
    from lowerdeck.openvino.runtime import OpenvinoRuntime

__all__ = [
    # Ahead of time
    "OpenvinoBackend",
    "OpenvinoPartitioner",
    # At run time
    "OpenvinoRuntime",
    # Inside a payload
    "decode_payload",
    # Errors
    "OpenvinoError",
    "BlobError",
    "CompileError",
    "DelegateInputError",
    "DelegateRunError",
    "DeviceError",
]

_LAZY_MODULES = {
    "OpenvinoBackend": "backend",
    "OpenvinoPartitioner": "backend",
    "OpenvinoRuntime": "runtime",
    "decode_payload": "payload",
    "CompileError": "compile_error",
}


def __getattr__(name: str) -> Any:
    """Import a name lazily."""
    if name not in _LAZY_MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY_MODULES[name]}"), name)
