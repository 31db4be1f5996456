"""Decompositions of operators whose kernel is missing or wrong."""
