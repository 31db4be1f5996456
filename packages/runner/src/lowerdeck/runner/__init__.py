"""Run, profile and compare .pte programs in Python."""

from lowerdeck.runner.binding import official_binding, official_binding_name
from lowerdeck.runner.bundles import make_bundle
from lowerdeck.runner.comparison.comparison import Comparison, Difference, compare
from lowerdeck.runner.debug_info import DebugMaps, SourceLocation
from lowerdeck.runner.delegates import BackendRuntime, DelegateLog, LogsEvents
from lowerdeck.runner.errors import (
    BusyError,
    ExecutionError,
    InputError,
    MemoryPlanError,
    MissingKernelError,
    OfficialRuntimeError,
    ProgramError,
    RunnerError,
)
from lowerdeck.runner.loading import load
from lowerdeck.runner.method import LoadedMethod
from lowerdeck.runner.official_runtime import OfficialCalls, OfficialRuntime
from lowerdeck.runner.profile import Event, Profile
from lowerdeck.runner.program import LoadedProgram

__all__ = [
    # Loading and running
    "load",
    "LoadedProgram",
    "LoadedMethod",
    # Backends
    "BackendRuntime",
    "LogsEvents",
    "DelegateLog",
    # Profiling and comparison
    "Profile",
    "Event",
    "SourceLocation",
    "compare",
    "Comparison",
    "Difference",
    "DebugMaps",
    # Programs with test cases
    "make_bundle",
    # The official runtime
    "OfficialRuntime",
    "OfficialCalls",
    "official_binding",
    "official_binding_name",
    # Errors
    "RunnerError",
    "ProgramError",
    "MissingKernelError",
    "InputError",
    "ExecutionError",
    "MemoryPlanError",
    "BusyError",
    "OfficialRuntimeError",
]
