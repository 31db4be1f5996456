"""Decompositions of operators that have no kernel, or a wrong one."""

from lowerdeck.emitter.decompositions.table import decompose

__all__ = ["decompose"]
