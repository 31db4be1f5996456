"""Operators of instructions: torch kernels, scalar operators, views."""
