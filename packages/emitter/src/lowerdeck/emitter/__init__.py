"""Turn an ExportedProgram into a Program that the official ExecuTorch runtime runs."""

from lowerdeck.emitter.bounds import Bounds, bounded
from lowerdeck.emitter.config import EmitConfig
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
from lowerdeck.emitter.memory import (
    Lifetime,
    MemoryPlan,
    MemoryPlanner,
    Place,
    PlannedBlock,
    PlanRequest,
    check_plan,
    fast_and_large,
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
    # Kernels of the target
    "KernelTable",
    "OFFICIAL_KERNELS",
    "RUNTIME_VERSION",
    # Memory
    "MemoryPlan",
    "PlannedBlock",
    "MemoryPlanner",
    "PlanRequest",
    "Place",
    "Lifetime",
    "one_memory",
    "fast_and_large",
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
