"""Small honest example backends for Lowerdeck.

Importing this package alone makes no backend known by its name: running a file needs its runtime
half only, and another compiler's backend of the same id may be in use. The first use of any other
part imports all of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lowerdeck.demo_backends.errors import (
    BlobError,
    DelegateInputError,
    DelegateRunError,
    DemoBackendError,
    UnsupportedNodeError,
)

if TYPE_CHECKING:
    from lowerdeck.demo_backends.delegate_mapping_demo import (
        OWN_IDENTIFIERS,
        BackendWithDelegateMappingDemo,
        DelegateMappingDemoPartitioner,
        DelegateMappingDemoRuntime,
    )
    from lowerdeck.demo_backends.executor_backend import (
        ExecutorBackend,
        ExecutorPartitioner,
        ExecutorRuntime,
    )
    from lowerdeck.demo_backends.shared_weights_demo import (
        BackendWithSharedWeightsDemo,
        SharedWeightsDemoPartitioner,
        SharedWeightsDemoRuntime,
    )
    from lowerdeck.demo_backends.state_demo import (
        BackendWithStateDemo,
        KvCacheAttention,
        StateDemoPartitioner,
        StateDemoRuntime,
    )

__all__ = [
    # Fusion and decomposition with debug maps
    "BackendWithDelegateMappingDemo",
    "DelegateMappingDemoPartitioner",
    "DelegateMappingDemoRuntime",
    "OWN_IDENTIFIERS",
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
    # Errors
    "DemoBackendError",
    "BlobError",
    "DelegateInputError",
    "DelegateRunError",
    "UnsupportedNodeError",
]

_DEMOS = ("delegate_mapping_demo", "executor_backend", "shared_weights_demo", "state_demo")


def __getattr__(name: str) -> Any:
    """Return a part of the backends, importing all of them at the first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    demos = [importlib.import_module(f"{__name__}.{demo}") for demo in _DEMOS]
    return next(getattr(demo, name) for demo in demos if hasattr(demo, name))
