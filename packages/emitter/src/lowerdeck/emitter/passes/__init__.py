"""Passes over the functional IR of a method, one per module."""

from lowerdeck.emitter.passes.pipeline import run_passes
from lowerdeck.emitter.passes.select_kernels import require_kernels
from lowerdeck.emitter.passes.writing_in_place import write_in_place

__all__ = ["require_kernels", "run_passes", "write_in_place"]
