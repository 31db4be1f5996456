"""Run, watch and compare .pte programs in Python."""

from lowerdeck.runner.delegates import BackendRuntime, CountsInputs
from lowerdeck.runner.errors import (
    ExecutionError,
    InputError,
    MemoryPlanError,
    ProgramError,
    RunnerError,
)
from lowerdeck.runner.loading import load
from lowerdeck.runner.method import LoadedMethod
from lowerdeck.runner.program import LoadedProgram

__all__ = [
    # Loading and running
    "load",
    "LoadedProgram",
    "LoadedMethod",
    # Backends
    "BackendRuntime",
    "CountsInputs",
    # Errors
    "RunnerError",
    "ProgramError",
    "InputError",
    "ExecutionError",
    "MemoryPlanError",
]
