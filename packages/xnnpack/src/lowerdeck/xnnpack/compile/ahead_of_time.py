"""Everything that is needed to compile; importing it makes the backend known by its name."""

from lowerdeck.xnnpack.compile.backend import XnnpackBackend
from lowerdeck.xnnpack.compile.partitioner import XnnpackPartitioner

__all__ = ["XnnpackBackend", "XnnpackPartitioner"]
