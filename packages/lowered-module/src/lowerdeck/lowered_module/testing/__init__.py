"""Try backends and partitioners: programs, a reference backend, and a list of what passes."""

from lowerdeck.lowered_module.testing.conformance import (
    ConformanceReport,
    check_backend,
    default_samples,
)
from lowerdeck.lowered_module.testing.programs import GeneratedModel, Sample, generated
from lowerdeck.lowered_module.testing.reference import (
    RunPartitioner,
    TaggingPartitioner,
    VerbatimBackend,
)

__all__ = [
    # The list of what passes
    "ConformanceReport",
    "check_backend",
    "default_samples",
    # Programs
    "GeneratedModel",
    "Sample",
    "generated",
    # A backend and partitioners that accept anything
    "RunPartitioner",
    "TaggingPartitioner",
    "VerbatimBackend",
]
