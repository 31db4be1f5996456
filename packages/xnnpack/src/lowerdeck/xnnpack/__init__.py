"""Compile programs for the XNNPACK delegate of the official runtime, and run them here.

Importing this package does not register a backend: running a file needs only the runtime half, and
another compiler's backend of the same id may be registered. Each half is imported at first use, so
that compiling does not load the Python kernels and running does not load the compiler.
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
    # Payloads, as the serializer reads them
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
    """Return a part of one half, importing it at the first use."""
    if name not in _HALVES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HALVES[name]}"), name)
