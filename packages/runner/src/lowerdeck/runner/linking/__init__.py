"""Bind the instructions of a file to kernels."""
