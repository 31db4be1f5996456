"""Compile programs with OpenVINO for the delegate of the official runtime, and run them here.

Importing this package alone makes no backend known by its name: each half is imported at its
first use, so that running a file leaves ExecuTorch's backend of the same id the only one.
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

_HALVES = {
    "OpenvinoBackend": "backend",
    "OpenvinoPartitioner": "backend",
    "OpenvinoRuntime": "runtime",
    "decode_payload": "payload",
    "CompileError": "compile_error",
}


def __getattr__(name: str) -> Any:
    """Return a part of one half, importing it at the first use."""
    if name not in _HALVES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HALVES[name]}"), name)
