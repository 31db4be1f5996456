"""Memory planning: lifetimes and placement of storages."""

from lowerdeck.emitter.memory.lifetimes import Lifetime, Spans, spans
from lowerdeck.emitter.memory.memory_plan import (
    MemoryPlanner,
    Place,
    PlanRequest,
    check_plan,
    one_memory,
    plan_memory,
    with_state,
)

__all__ = [
    "Lifetime",
    "MemoryPlanner",
    "Place",
    "PlanRequest",
    "Spans",
    "check_plan",
    "one_memory",
    "plan_memory",
    "spans",
    "with_state",
]
