"""Small honest example backends for Lowerdeck, and one that phones run."""

from lowerdeck.demo_backends.compiler_demo import (
    BackendWithCompilerDemo,
    CompilerDemoPartitioner,
    CompilerDemoRuntime,
)
from lowerdeck.demo_backends.delegate_mapping_demo import (
    OWN_IDENTIFIERS,
    BackendWithDelegateMappingDemo,
    DelegateMappingDemoPartitioner,
    DelegateMappingDemoRuntime,
)
from lowerdeck.demo_backends.errors import (
    BlobError,
    CompilerMissingError,
    DelegateInputError,
    DelegateRunError,
    DemoBackendError,
    NativeCodeError,
    UnsupportedNodeError,
)
from lowerdeck.demo_backends.executor_backend import (
    ExecutorBackend,
    ExecutorPartitioner,
    ExecutorRuntime,
)
from lowerdeck.demo_backends.inductor_backend import (
    InductorBackend,
    InductorPartitioner,
    InductorRuntime,
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
from lowerdeck.demo_backends.xnnpack.backend import XnnpackBackend
from lowerdeck.demo_backends.xnnpack.partitioner import XnnpackPartitioner
from lowerdeck.demo_backends.xnnpack.runtime import XnnpackRuntime

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
