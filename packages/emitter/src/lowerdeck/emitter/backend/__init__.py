"""Lower the functional IR to the instructions and values of a program."""

from lowerdeck.emitter.backend.build_plan import PlanBuilder
from lowerdeck.emitter.backend.constant_methods import constant_plan
from lowerdeck.emitter.backend.debug_map import (
    DebugTrace,
    DelegateSource,
    InstructionSource,
    stack_frames,
    unused_handles,
)
from lowerdeck.emitter.backend.external_weights import ChosenFiles, ExternalWeights, is_stem
from lowerdeck.emitter.backend.linearizing import linearize

__all__ = [
    "ChosenFiles",
    "DebugTrace",
    "DelegateSource",
    "ExternalWeights",
    "InstructionSource",
    "PlanBuilder",
    "constant_plan",
    "is_stem",
    "linearize",
    "stack_frames",
    "unused_handles",
]
