"""Decompose exported programs into core operators, tracing each distinct call once."""

from __future__ import annotations

from lowerdeck.decompose._torch_private import declines
from lowerdeck.decompose.cache import DecompositionCache
from lowerdeck.decompose.decomposing import decompose, decompose_graph, explain, functionalize
from lowerdeck.decompose.devices import methods_on_cpu, on_cpu
from lowerdeck.decompose.errors import DecomposeError
from lowerdeck.decompose.inner_tensors import unwrap_subclass_parameters
from lowerdeck.decompose.keeping import can_keep
from lowerdeck.decompose.results import Explanation, Parts
from lowerdeck.decompose.rules import Rules, keep_whole

__all__ = [
    "DecomposeError",
    "DecompositionCache",
    "Explanation",
    "Parts",
    "Rules",
    "can_keep",
    "declines",
    "decompose",
    "explain",
    "functionalize",
    "methods_on_cpu",
    "on_cpu",
    "keep_whole",
    "decompose_graph",
    "unwrap_subclass_parameters",
]
