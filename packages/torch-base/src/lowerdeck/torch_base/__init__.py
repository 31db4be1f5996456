"""What nodes of torch.fx graphs do besides computing: effects, writes in place, shared memory.

The lowest layer: what several packages must know of torch's graphs, each fact once. It changes no
graph and replaces nothing of torch.
"""

from __future__ import annotations

from lowerdeck.torch_base._torch_private import upper_bound
from lowerdeck.torch_base.attributes import attribute, has_attribute
from lowerdeck.torch_base.behaviours import Behaviours
from lowerdeck.torch_base.callees import Behaviour, Effect, hides_aliases
from lowerdeck.torch_base.copies import OwnCopies, lazy_clone
from lowerdeck.torch_base.explicit_writes import aliasing_parts, explicit
from lowerdeck.torch_base.extents import Extent, MemoryMap
from lowerdeck.torch_base.graphs import (
    attribute_of,
    copy_graph_module,
    graphs_of,
    nested_graphs,
)
from lowerdeck.torch_base.memory import MemoryUse, held_tensors, shared_inputs
from lowerdeck.torch_base.overlaps import WrittenOverlap, written_overlap
from lowerdeck.torch_base.repeated_writes import RepeatedMemoryError
from lowerdeck.torch_base.source_line import describe_node
from lowerdeck.torch_base.tensor_bytes import bytes_of
from lowerdeck.torch_base.tensor_view import view_tensor

__all__ = [
    # What a node does
    "Behaviour",
    "Behaviours",
    "Effect",
    # What shares memory
    "Extent",
    "MemoryMap",
    "MemoryUse",
    "WrittenOverlap",
    "held_tensors",
    "hides_aliases",
    "shared_inputs",
    "written_overlap",
    # The bytes of a tensor, and copies that cost nothing until they are written
    "OwnCopies",
    "bytes_of",
    "lazy_clone",
    "view_tensor",
    # What a message and a compiler ask of a node
    "describe_node",
    "upper_bound",
    # What torch's functionalisation would lose, said explicitly
    "RepeatedMemoryError",
    "aliasing_parts",
    "explicit",
    # Graphs in graphs
    "attribute_of",
    "copy_graph_module",
    "graphs_of",
    "nested_graphs",
    # Attributes by their dotted path
    "attribute",
    "has_attribute",
]
