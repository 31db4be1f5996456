"""Turn an ExportedProgram into a Program that the official ExecuTorch runtime runs."""

from lowerdeck.emitter.config import EmitConfig
from lowerdeck.emitter.emit import emit
from lowerdeck.emitter.errors import (
    EmitterError,
    InvalidDelegateError,
    MemoryPlanError,
    MissingKernel,
    MissingKernelError,
    UnboundedSizeError,
    UnsupportedError,
)
from lowerdeck.emitter.kernels import OFFICIAL_KERNELS, RUNTIME_VERSION, KernelTable
from lowerdeck.emitter.program import EmittedProgram

__all__ = [
    # Emission
    "emit",
    "EmitConfig",
    "EmittedProgram",
    # Kernels of the target
    "KernelTable",
    "OFFICIAL_KERNELS",
    "RUNTIME_VERSION",
    # Errors
    "EmitterError",
    "InvalidDelegateError",
    "MemoryPlanError",
    "MissingKernel",
    "MissingKernelError",
    "UnboundedSizeError",
    "UnsupportedError",
]
