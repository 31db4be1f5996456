"""Exported programs taken apart into core operators, each distinct call traced once."""

from __future__ import annotations

from lowerdeck.decompose.cache import DecompositionCache
from lowerdeck.decompose.decomposing import Explanation, decompose, explain
from lowerdeck.decompose.errors import DecomposeError

__all__ = ["DecomposeError", "DecompositionCache", "Explanation", "decompose", "explain"]
