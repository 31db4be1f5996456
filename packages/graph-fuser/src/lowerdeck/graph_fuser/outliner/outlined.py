"""Result of outlining one region."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from lowerdeck.graph_fuser.regions import Region


@dataclass(frozen=True, slots=True)
class OutlinedRegion:
    """Module, call and boundary of an outlined region.

    Attributes:
        module: The submodule; its code is generated at first use.
        call_node: The ``call_module`` node in the parent's graph.
        inputs: Original outer nodes passed as arguments, in order.
        outputs: Original inner nodes returned, in order; erased from the graph, with name and meta
            intact.
        arguments: Argument nodes in the parent's new graph.
        results: Nodes of the parent's new graph that replace ``outputs``: the call if its single
            output is returned without a tuple, else one ``getitem`` each.
        node_map: Maps the region's inputs and direct nodes to nodes of its graph.
    """

    region: Region
    module: GraphModule
    call_node: Node
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    arguments: tuple[Node, ...]
    results: tuple[Node, ...]
    node_map: Mapping[Node, Node]
