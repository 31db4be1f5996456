"""Compile spec for the precision of floats."""

from __future__ import annotations

from collections.abc import Sequence

from lowerdeck.lowered_module import CompileSpec

PRECISION = "precision"
"""Key of the compile spec that says how floats are stored and computed."""
PRECISIONS = ("fp16", "fp32")


def precision_of(compile_specs: Sequence[CompileSpec]) -> str | None:
    """Return what the specs of a partition say about floats, None if nothing."""
    found = [bytes(one.value).decode() for one in compile_specs if one.key == PRECISION]
    return found[-1] if found else None
