"""API of ``executorch.exir``, implemented with Lowerdeck."""

from lowerdeck.exir_compat.backend_config import ExecutorchBackendConfig, MemoryPlanningPass
from lowerdeck.exir_compat.edge_config import EdgeCompileConfig
from lowerdeck.exir_compat.edge_manager import EdgeProgramManager
from lowerdeck.exir_compat.emitting import EmitterOutput
from lowerdeck.exir_compat.errors import (
    ExirCompatError,
    SettingError,
    SettingWarning,
    TransformError,
    UnknownMethodError,
)
from lowerdeck.exir_compat.executorch_manager import ExecutorchProgramManager
from lowerdeck.exir_compat.lowering import emit_program, to_edge, to_edge_transform_and_lower

__all__ = [
    # Lowering and emission
    "to_edge",
    "to_edge_transform_and_lower",
    "EdgeProgramManager",
    "ExecutorchProgramManager",
    "emit_program",
    "EmitterOutput",
    # Settings
    "EdgeCompileConfig",
    "ExecutorchBackendConfig",
    "MemoryPlanningPass",
    # Errors
    "ExirCompatError",
    "SettingError",
    "SettingWarning",
    "TransformError",
    "UnknownMethodError",
]
