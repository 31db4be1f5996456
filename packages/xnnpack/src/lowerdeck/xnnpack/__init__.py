"""XNNPACK backend: compiler for the official runtime's delegate, and a Python reference runtime.

Importing this package does not register a backend, because another compiler may have registered
the same id. Compiler and runtime are imported independently, each at its first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lowerdeck.serializer import XnnGraph, decode_payload
from lowerdeck.xnnpack.errors import (
    BlobError,
    DelegateInputError,
    DelegateRunError,
    QuantizationError,
    UnsupportedNodeError,
    XnnpackError,
)

if TYPE_CHECKING:
    from lowerdeck.xnnpack.compile.ahead_of_time import XnnpackBackend, XnnpackPartitioner
    from lowerdeck.xnnpack.runtime.runtime import XnnpackRuntime

__all__ = [
    # Ahead of time
    "XnnpackBackend",
    "XnnpackPartitioner",
    # At run time
    "XnnpackRuntime",
    # Payloads, defined by the serializer
    "XnnGraph",
    "decode_payload",
    # Errors
    "XnnpackError",
    "BlobError",
    "DelegateInputError",
    "DelegateRunError",
    "UnsupportedNodeError",
    "QuantizationError",
]


_HALVES = {
    "XnnpackBackend": "compile.ahead_of_time",
    "XnnpackPartitioner": "compile.ahead_of_time",
    "XnnpackRuntime": "runtime.runtime",
}


def __getattr__(name: str) -> Any:
    """Import the compiler or the runtime at the first access to one of its names."""
    if name not in _HALVES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HALVES[name]}"), name)
