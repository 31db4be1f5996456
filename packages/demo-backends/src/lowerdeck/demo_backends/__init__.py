"""Small honest example backends for Lowerdeck, and one that phones run."""

from lowerdeck.demo_backends.delegate_mapping_demo import (
    OWN_IDENTIFIERS,
    BackendWithDelegateMappingDemo,
    DelegateMappingDemoPartitioner,
    DelegateMappingDemoRuntime,
)
from lowerdeck.demo_backends.errors import (
    BlobError,
    DelegateInputError,
    DelegateRunError,
    DemoBackendError,
    UnsupportedNodeError,
)

__all__ = [
    # Fusion and decomposition with debug maps
    "BackendWithDelegateMappingDemo",
    "DelegateMappingDemoPartitioner",
    "DelegateMappingDemoRuntime",
    "OWN_IDENTIFIERS",
    # Errors
    "DemoBackendError",
    "BlobError",
    "DelegateInputError",
    "DelegateRunError",
    "UnsupportedNodeError",
]
