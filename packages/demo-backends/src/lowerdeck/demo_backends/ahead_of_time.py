"""Everything that is needed to compile; importing it makes the backends known by their names."""

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

__all__ = [
    "BackendWithCompilerDemo",
    "CompilerDemoPartitioner",
    "CompilerDemoRuntime",
    "OWN_IDENTIFIERS",
    "BackendWithDelegateMappingDemo",
    "DelegateMappingDemoPartitioner",
    "DelegateMappingDemoRuntime",
    "ExecutorBackend",
    "ExecutorPartitioner",
    "ExecutorRuntime",
    "InductorBackend",
    "InductorPartitioner",
    "InductorRuntime",
    "BackendWithSharedWeightsDemo",
    "SharedWeightsDemoPartitioner",
    "SharedWeightsDemoRuntime",
    "BackendWithStateDemo",
    "KvCacheAttention",
    "StateDemoPartitioner",
    "StateDemoRuntime",
]
