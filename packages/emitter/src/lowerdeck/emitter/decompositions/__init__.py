"""Which operators torch takes apart before the emitter reads the graph, and how."""

from lowerdeck.emitter.decompositions.table import decompose

__all__ = ["decompose"]
