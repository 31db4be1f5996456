"""Check memory plans for overlaps, and fill dead memory with NaN."""

from lowerdeck.runner.memory.overlaps import MemoryPlan
from lowerdeck.runner.memory.poison import Poison

__all__ = ["MemoryPlan", "Poison"]
