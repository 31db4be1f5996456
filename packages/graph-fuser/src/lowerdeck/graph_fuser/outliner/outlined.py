"""Result of outlining one region: its module, its call and the values that cross its border."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from lowerdeck.graph_fuser.regions import Region


@dataclass(frozen=True, slots=True)
class OutlinedRegion:
    """What became of one region.

    Attributes:
        region: The region that was asked for.
        module: Its module, whose code is generated at its first use.
        call_node: The ``call_module`` node in the parent's graph.
        inputs: The outer nodes, of the graph as it was, whose values are passed, in order.
        outputs: The inner nodes, of the graph as it was, whose values are returned, in order. They
            are erased from the graph, but keep their names and meta.
        arguments: The nodes of the parent's graph that are passed now.
        results: The nodes of the parent's graph that carry ``outputs`` now: the call itself where
            one output is returned bare, else one ``getitem`` each.
        node_map: From the nodes that were directly in the region, and its inputs, to the nodes of
            its graph.
    """

    region: Region
    module: GraphModule
    call_node: Node
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    arguments: tuple[Node, ...]
    results: tuple[Node, ...]
    node_map: Mapping[Node, Node]
