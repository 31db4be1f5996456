"""The ahead-of-time half: partitioner and payload compiler."""

from lowerdeck.xnnpack.compile.partitioner import XnnpackPartitioner

__all__ = ["XnnpackPartitioner"]
