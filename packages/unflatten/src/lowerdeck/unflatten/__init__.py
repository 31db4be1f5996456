"""Give an ExportedProgram its eager module hierarchy back."""

from lowerdeck.unflatten.build import unflatten
from lowerdeck.unflatten.dispatcher import InterpreterModuleDispatcher
from lowerdeck.unflatten.errors import (
    InputConstraintError,
    InputStructureError,
    UnflattenError,
    UnsupportedProgramError,
)
from lowerdeck.unflatten.flat_args import FlatArgsAdapter
from lowerdeck.unflatten.interpreter_module import InterpreterModule
from lowerdeck.unflatten.unflattened_module import UnflattenedModule

__all__ = [
    # Entry point
    "unflatten",
    # What it makes
    "InterpreterModule",
    "InterpreterModuleDispatcher",
    "UnflattenedModule",
    # What the caller may give
    "FlatArgsAdapter",
    # Errors
    "InputConstraintError",
    "InputStructureError",
    "UnflattenError",
    "UnsupportedProgramError",
]
