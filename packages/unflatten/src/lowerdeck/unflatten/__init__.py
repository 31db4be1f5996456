"""Give an ExportedProgram its eager module hierarchy back."""

from lowerdeck.unflatten.build import unflatten
from lowerdeck.unflatten.calls.flat_args import FlatArgsAdapter
from lowerdeck.unflatten.errors import (
    InputConstraintError,
    InputStructureError,
    UnflattenError,
    UnsupportedProgramError,
)
from lowerdeck.unflatten.exporting import export_preserving
from lowerdeck.unflatten.modules import (
    InterpreterModule,
    InterpreterModuleDispatcher,
    Swap,
    SwapTable,
    UnflattenedModule,
)

__all__ = [
    # Entry points
    "export_preserving",
    "unflatten",
    # What it makes
    "InterpreterModule",
    "InterpreterModuleDispatcher",
    "Swap",
    "SwapTable",
    "UnflattenedModule",
    # What the caller may give
    "FlatArgsAdapter",
    # Errors
    "InputConstraintError",
    "InputStructureError",
    "UnflattenError",
    "UnsupportedProgramError",
]
