"""The instructions of a method, and the order in which they may run."""

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
