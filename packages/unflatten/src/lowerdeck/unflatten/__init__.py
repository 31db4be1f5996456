"""Restore the eager module hierarchy of an ExportedProgram."""

from lowerdeck.unflatten.api import unflatten
from lowerdeck.unflatten.call_signature import FlatArgsAdapter
from lowerdeck.unflatten.errors import (
    InputConstraintError,
    InputStructureError,
    UnflattenError,
    UnsupportedProgramError,
)
from lowerdeck.unflatten.exporting import export_preserving
from lowerdeck.unflatten.module import (
    InterpreterModule,
    InterpreterModuleDispatcher,
    UnflattenedModule,
)
from lowerdeck.unflatten.swaps import Swap, SwapTable

__all__ = [
    # Entry points
    "export_preserving",
    "unflatten",
    # Results
    "InterpreterModule",
    "InterpreterModuleDispatcher",
    "Swap",
    "SwapTable",
    "UnflattenedModule",
    # Extension points
    "FlatArgsAdapter",
    # Errors
    "InputConstraintError",
    "InputStructureError",
    "UnflattenError",
    "UnsupportedProgramError",
]
