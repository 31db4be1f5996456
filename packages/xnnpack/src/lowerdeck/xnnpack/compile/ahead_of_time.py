"""Public names of the compiler; importing this module registers the backend."""

from lowerdeck.xnnpack.compile.backend import XnnpackBackend
from lowerdeck.xnnpack.compile.partitioner import XnnpackPartitioner

__all__ = ["XnnpackBackend", "XnnpackPartitioner"]
