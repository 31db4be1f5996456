"""Try backends and partitioners: programs, a reference backend, and a list of what passes."""

from lowerdeck.lowered_module.testing.programs import GeneratedModel, Sample, generated
from lowerdeck.lowered_module.testing.reference import (
    RunPartitioner,
    TaggingPartitioner,
    VerbatimBackend,
)

__all__ = [
    # Programs
    "GeneratedModel",
    "Sample",
    "generated",
    # A backend and partitioners that accept anything
    "RunPartitioner",
    "TaggingPartitioner",
    "VerbatimBackend",
]
