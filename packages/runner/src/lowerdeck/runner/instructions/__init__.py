"""Bound instructions of a method and their control flow."""

from lowerdeck.runner.instructions.flow import successors
from lowerdeck.runner.instructions.machine import (
    BoundChain,
    Instruction,
    Step,
    run_chains,
)

__all__ = [
    "BoundChain",
    "Instruction",
    "Step",
    "run_chains",
    "successors",
]
