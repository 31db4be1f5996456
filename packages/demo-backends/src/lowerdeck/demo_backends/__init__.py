"""Small honest example backends for Lowerdeck, and one that phones run.

Importing this package alone makes no backend known by its name: running a file needs its runtime
half only, and another compiler's backend of the same id may be in use. The first use of any other
part imports all of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lowerdeck.demo_backends.errors import (
    BlobError,
    CompilerMissingError,
    DelegateInputError,
    DelegateRunError,
    DemoBackendError,
    NativeCodeError,
    UnsupportedNodeError,
)
from lowerdeck.demo_backends.xnnpack.runtime import XnnpackRuntime

if TYPE_CHECKING:
    from lowerdeck.demo_backends.ahead_of_time import (
        OWN_IDENTIFIERS,
        BackendWithCompilerDemo,
        BackendWithDelegateMappingDemo,
        BackendWithSharedWeightsDemo,
        BackendWithStateDemo,
        CompilerDemoPartitioner,
        CompilerDemoRuntime,
        DelegateMappingDemoPartitioner,
        DelegateMappingDemoRuntime,
        ExecutorBackend,
        ExecutorPartitioner,
        ExecutorRuntime,
        InductorBackend,
        InductorPartitioner,
        InductorRuntime,
        KvCacheAttention,
        SharedWeightsDemoPartitioner,
        SharedWeightsDemoRuntime,
        StateDemoPartitioner,
        StateDemoRuntime,
        XnnpackBackend,
        XnnpackPartitioner,
    )

__all__ = [
    # Fusion and decomposition with debug maps
    "BackendWithDelegateMappingDemo",
    "DelegateMappingDemoPartitioner",
    "DelegateMappingDemoRuntime",
    "OWN_IDENTIFIERS",
    # Operators one by one, with compile specs
    "BackendWithCompilerDemo",
    "CompilerDemoPartitioner",
    "CompilerDemoRuntime",
    # Programs inside programs
    "ExecutorBackend",
    "ExecutorPartitioner",
    "ExecutorRuntime",
    # Methods that share weights
    "BackendWithSharedWeightsDemo",
    "SharedWeightsDemoPartitioner",
    "SharedWeightsDemoRuntime",
    # State inside the delegate
    "BackendWithStateDemo",
    "KvCacheAttention",
    "StateDemoPartitioner",
    "StateDemoRuntime",
    # Native code for the host
    "InductorBackend",
    "InductorPartitioner",
    "InductorRuntime",
    # What phones run
    "XnnpackBackend",
    "XnnpackPartitioner",
    "XnnpackRuntime",
    # Errors
    "DemoBackendError",
    "BlobError",
    "CompilerMissingError",
    "DelegateInputError",
    "DelegateRunError",
    "NativeCodeError",
    "UnsupportedNodeError",
]


def __getattr__(name: str) -> Any:
    """Return a part of the backends, importing all of them at the first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.ahead_of_time"), name)
