"""Memory plans: check of overlaps, and dead memory filled with NaN."""

from lowerdeck.runner.memory.overlaps import MemoryPlan
from lowerdeck.runner.memory.poison import Poison

__all__ = ["MemoryPlan", "Poison"]
