"""Decompositions of operators whose kernel is missing or wrong."""

from lowerdeck.emitter.decompositions.table import decompose

__all__ = ["decompose"]
