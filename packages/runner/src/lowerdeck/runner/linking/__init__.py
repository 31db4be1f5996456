"""Bind the instructions of a file to kernels."""

from lowerdeck.runner.linking.linking import Linker

__all__ = ["Linker"]
