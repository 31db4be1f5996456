"""Memory plan checks: reads of overwritten values, and dead memory filled with NaN."""

from lowerdeck.runner.memory.plan_check import PlanCheck
from lowerdeck.runner.memory.poison import Poison

__all__ = ["PlanCheck", "Poison"]
