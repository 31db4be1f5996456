"""Making quantised programs: where PT2E is to quantise, and in which numbers."""

from lowerdeck.xnnpack.quantize.annotate import annotate_arithmetic, annotate_layers, share_scales
from lowerdeck.xnnpack.quantize.specs import specs_for

__all__ = ["annotate_arithmetic", "annotate_layers", "share_scales", "specs_for"]
