"""The compiler: partitioner and payload emission."""

from lowerdeck.xnnpack.compile.partitioner import XnnpackPartitioner

__all__ = ["XnnpackPartitioner"]
