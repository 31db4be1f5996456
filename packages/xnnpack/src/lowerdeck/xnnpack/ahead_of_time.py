"""Everything that is needed to compile; importing it makes the backend known by its name."""

from lowerdeck.xnnpack.backend import XnnpackBackend
from lowerdeck.xnnpack.partitioner import XnnpackPartitioner

__all__ = ["XnnpackBackend", "XnnpackPartitioner"]
