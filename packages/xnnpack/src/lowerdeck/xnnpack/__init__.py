"""Compile programs for the XNNPACK delegate of the official runtime, and run them here.

Importing this package alone makes no backend known by its name: running a file needs its runtime
half only, and another compiler's backend of the same id may be in use. The first use of the half
that compiles imports it.
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
from lowerdeck.xnnpack.runtime.runtime import XnnpackRuntime

if TYPE_CHECKING:
    from lowerdeck.xnnpack.compile.ahead_of_time import XnnpackBackend, XnnpackPartitioner

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


def __getattr__(name: str) -> Any:
    """Return a part of the half that compiles, importing it at the first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.compile.ahead_of_time"), name)
