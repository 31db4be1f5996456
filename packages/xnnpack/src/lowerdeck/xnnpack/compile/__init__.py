"""The half that compiles: which nodes go to XNNPACK, and their payload."""

from lowerdeck.xnnpack.compile.partitioner import XnnpackPartitioner

__all__ = ["XnnpackPartitioner"]
