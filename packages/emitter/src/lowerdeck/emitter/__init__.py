"""Emit an ExportedProgram as a Program for the official ExecuTorch runtime."""

from lowerdeck.emitter.bounds import Bounds, bounded
from lowerdeck.emitter.config import EmitConfig
from lowerdeck.emitter.decompositions.experts import pre_partition_rules
from lowerdeck.emitter.emission import emit
from lowerdeck.emitter.errors import (
    DecompositionError,
    EmitterError,
    InvalidDelegateError,
    MemoryPlanError,
    MissingKernel,
    MissingKernelError,
    UnboundedSizeError,
    UnsupportedError,
)
from lowerdeck.emitter.ir.kernels import OFFICIAL_KERNELS, KernelTable
from lowerdeck.emitter.memory.lifetimes import Lifetime
from lowerdeck.emitter.memory.memory_plan import (
    MemoryPlanner,
    Place,
    PlanRequest,
    check_plan,
    one_memory,
)
from lowerdeck.emitter.program import EmittedProgram
from lowerdeck.serializer import RUNTIME_VERSION

__all__ = [
    # Emission
    "emit",
    "EmitConfig",
    "EmittedProgram",
    # Dynamic dimensions
    "Bounds",
    "bounded",
    # Rules of lower
    "pre_partition_rules",
    # Kernels of the target
    "KernelTable",
    "OFFICIAL_KERNELS",
    "RUNTIME_VERSION",
    # Memory
    "MemoryPlanner",
    "PlanRequest",
    "Place",
    "Lifetime",
    "one_memory",
    "check_plan",
    # Errors
    "EmitterError",
    "DecompositionError",
    "InvalidDelegateError",
    "MemoryPlanError",
    "MissingKernel",
    "MissingKernelError",
    "UnboundedSizeError",
    "UnsupportedError",
]
