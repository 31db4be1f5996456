"""Small example backends for Lowerdeck.

Importing this package registers no backend, because another backend of the same id may be in use.
The first access to a name that is not an error class imports and registers both backends.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lowerdeck.demo_backends.errors import (
    BlobError,
    DelegateInputError,
    DelegateRunError,
    DemoBackendError,
)

if TYPE_CHECKING:
    from lowerdeck.demo_backends.delegate_mapping_demo import (
        OWN_IDENTIFIERS,
        BackendWithDelegateMappingDemo,
        DelegateMappingDemoPartitioner,
        DelegateMappingDemoRuntime,
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
]

_DEMOS = ("delegate_mapping_demo", "state_demo")


def __getattr__(name: str) -> Any:
    """Import both backends at the first access to one of their names."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    demos = [importlib.import_module(f"{__name__}.{demo}") for demo in _DEMOS]
    return next(getattr(demo, name) for demo in demos if hasattr(demo, name))
