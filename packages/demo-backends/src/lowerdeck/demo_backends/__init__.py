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
from lowerdeck.demo_backends.xnnpack.backend import XnnpackBackend
from lowerdeck.demo_backends.xnnpack.partitioner import XnnpackPartitioner
from lowerdeck.demo_backends.xnnpack.runtime import XnnpackRuntime

__all__ = [
    # Fusion and decomposition with debug maps
    "BackendWithDelegateMappingDemo",
    "DelegateMappingDemoPartitioner",
    "DelegateMappingDemoRuntime",
    "OWN_IDENTIFIERS",
    # What phones run
    "XnnpackBackend",
    "XnnpackPartitioner",
    "XnnpackRuntime",
    # Errors
    "DemoBackendError",
    "BlobError",
    "DelegateInputError",
    "DelegateRunError",
    "UnsupportedNodeError",
]
