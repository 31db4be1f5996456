"""Compile spec for the precision of floats."""

from __future__ import annotations

from collections.abc import Sequence

from lowerdeck.lowered_module import CompileSpec

PRECISION = "precision"
"""Key of the compile spec for the storage and compute precision of floats."""
PRECISIONS = ("fp16", "fp32")


def precision_of(compile_specs: Sequence[CompileSpec]) -> str | None:
    """Return the precision in a partition's compile specs, or None."""
    values = [bytes(spec.value).decode() for spec in compile_specs if spec.key == PRECISION]
    return values[-1] if values else None
