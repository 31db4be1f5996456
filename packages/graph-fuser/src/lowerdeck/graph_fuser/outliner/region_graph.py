"""Build the graph of one region independently of the others."""

from __future__ import annotations

import operator
from typing import NamedTuple

from torch.fx import Graph, Node

from lowerdeck.graph_fuser.order import call_meta, value_meta
from lowerdeck.graph_fuser.outliner.boundary import Boundary
from lowerdeck.graph_fuser.outliner.schedule import Schedule
from lowerdeck.graph_fuser.regions import RegionTree
from lowerdeck.torch_base import add_node, copy_node


class Call(NamedTuple):
    """The call of a region.

    Attributes:
        results: The region's output nodes in the calling graph.
        nodes: The call and its ``getitem`` nodes, in order.
    """

    node: Node
    results: tuple[Node, ...]
    nodes: tuple[Node, ...]


class GraphBuilder:
    """Builds the graphs of the regions of a validated tree.

    Methods take the region's index in the tree.

    Args:
        graph: The original graph; not changed.
        schedule: Order of the region bodies.
    """

    def __init__(
        self,
        graph: Graph,
        tree: RegionTree,
        boundary: Boundary,
        schedule: Schedule,
    ) -> None:
        self.graph = graph
        self.tree = tree
        self.boundary = boundary
        self.schedule = schedule
        self.calls: dict[int, Call] = {}

    def build(self, index: int) -> tuple[Graph, dict[Node, Node]]:
        """Return one region's new graph, and a map from original nodes to its nodes."""
        graph, env = Graph(), dict[Node, Node]()
        for outer in self.boundary.inputs[index]:
            name = outer.name
            placeholder = add_node(graph, "placeholder", name, (), name, type_expr=outer.type)
            placeholder.meta.update(value_meta(outer.meta))
            env[outer] = placeholder
        for item in self.schedule.body(index, self.tree.members[index]):
            if isinstance(item, int):
                self.call(item, graph, env)
            else:
                env[item] = copy_node(graph, item, env)
        outputs = self.boundary.outputs[index]
        # As in torch's fuser: a single result without a tuple, otherwise a tuple.
        bare = self.is_bare(index)
        result = env[outputs[0]] if bare else tuple(env[node] for node in outputs)
        output = add_node(graph, "output", "output", (result,), "output")
        if outputs:
            output.meta.update(call_meta(outputs, bare=bare))
        return graph, env

    def is_bare(self, index: int) -> bool:
        """Return whether a region returns its single output without a tuple."""
        region = self.tree.regions[index]
        return (
            region is not None
            and not region.always_return_tuple
            and len(self.boundary.outputs[index]) == 1
        )

    def call(self, index: int, graph: Graph, env: dict[Node, Node]) -> None:
        """Create a region's call and ``getitem`` nodes at the graph's insert point.

        Args:
            graph: The graph of its parent.
            env: Maps original nodes to nodes of ``graph``, if they differ; outputs are added.
        """
        outputs = self.boundary.outputs[index]
        name = self.tree.name(index) or ""
        arguments = tuple(env.get(outer, outer) for outer in self.boundary.inputs[index])
        bare = self.is_bare(index)
        type_expr = outputs[0].type if bare else None
        call = add_node(
            graph, "call_module", name, arguments, call_label(name), type_expr=type_expr
        )
        call.meta.update(call_meta(outputs, bare=bare))
        if bare:
            env[outputs[0]] = call
            self.calls[index] = Call(call, (call,), (call,))
            return
        results: list[Node] = []
        for element, node in enumerate(outputs):
            part = add_node(
                graph, "call_function", operator.getitem, (call, element), node.name, node.type
            )
            part.meta.update(value_meta(node.meta))
            env[node] = part
            results.append(part)
        self.calls[index] = Call(call, tuple(results), (call, *results))


def call_label(name: str) -> str:
    """Return the preferred node name for a call of region ``name``."""
    label = name.replace(".", "_")
    return label if label.isidentifier() else f"_{label}"
