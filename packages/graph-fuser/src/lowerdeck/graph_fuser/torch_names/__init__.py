"""Drop-in replacements for torch.fx.passes."""

from lowerdeck.graph_fuser.torch_names.capability import CapabilityBasedPartitioner
from lowerdeck.graph_fuser.torch_names.torch_names import (
    erase_nodes,
    fuse_as_graphmodule,
    fuse_by_partitions,
    insert_subgm,
)

__all__ = [
    "CapabilityBasedPartitioner",
    "erase_nodes",
    "fuse_as_graphmodule",
    "fuse_by_partitions",
    "insert_subgm",
]
