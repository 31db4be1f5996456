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
from lowerdeck.unflatten.modules.dispatcher import InterpreterModuleDispatcher
from lowerdeck.unflatten.modules.interpreter_module import InterpreterModule
from lowerdeck.unflatten.modules.swap_table import Swap, SwapTable
from lowerdeck.unflatten.modules.unflattened_module import UnflattenedModule

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
