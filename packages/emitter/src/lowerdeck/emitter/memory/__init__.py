"""Memory planning: lifetimes and placement of storages."""

from lowerdeck.emitter.memory.lifetimes import Lifetime, Spans, spans
from lowerdeck.emitter.memory.memory_plan import (
    MemoryPlan,
    MemoryPlanner,
    Place,
    PlannedBlock,
    PlanRequest,
    check_plan,
    fast_and_large,
    one_memory,
    plan_memory,
    with_state,
)

__all__ = [
    "Lifetime",
    "MemoryPlan",
    "MemoryPlanner",
    "Place",
    "PlanRequest",
    "PlannedBlock",
    "Spans",
    "check_plan",
    "fast_and_large",
    "one_memory",
    "plan_memory",
    "spans",
    "with_state",
]
