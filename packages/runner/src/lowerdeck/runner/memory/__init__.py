"""Checks of the memory plan: what shares bytes, what is needed when, who wrote last."""

from lowerdeck.runner.memory.aliases import is_unread_view
from lowerdeck.runner.memory.plan_check import PlanCheck
from lowerdeck.runner.memory.poison import Poison

__all__ = ["PlanCheck", "Poison", "is_unread_view"]
