"""Comparison of a program with eager, operator by operator."""
