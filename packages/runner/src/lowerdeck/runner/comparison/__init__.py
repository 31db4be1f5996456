"""Comparison of a program with eager, operator by operator."""

from lowerdeck.runner.comparison.comparison import Comparison, Difference, compare

__all__ = ["Comparison", "Difference", "compare"]
