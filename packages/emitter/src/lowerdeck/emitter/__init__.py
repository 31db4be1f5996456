"""Emit an ExportedProgram as a Program for the official ExecuTorch runtime."""

import importlib
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from lowerdeck.emitter.decompositions.table import pre_partition_rules

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


def __getattr__(name: str) -> Any:
    """Import the table of decompositions at the first access to one of its names."""
    if name != "pre_partition_rules":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.decompositions.table").pre_partition_rules
