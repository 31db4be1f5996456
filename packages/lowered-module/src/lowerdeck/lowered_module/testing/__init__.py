"""Test backends and partitioners: sample programs, a reference backend, conformance checks."""

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
    # Conformance
    "ConformanceReport",
    "check_backend",
    "default_samples",
    # Sample programs
    "GeneratedModel",
    "Sample",
    "generated",
    # A backend and partitioners that accept anything
    "RunPartitioner",
    "TaggingPartitioner",
    "VerbatimBackend",
]
