"""Build the new graph of one region, whatever becomes of the others."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch.fx import Graph, Node

from lowerdeck.graph_fuser._torch_private import share_codegen
from lowerdeck.graph_fuser.order import call_meta, value_meta
from lowerdeck.graph_fuser.outliner.boundary import AttributeName, Boundary
from lowerdeck.graph_fuser.outliner.schedule import Schedule
from lowerdeck.graph_fuser.regions import ROOT, Region, RegionTree
from lowerdeck.torch_base import add_node, copy_node


@dataclass(frozen=True, slots=True)
class RegionGraph:
    """A new graph of one region.

    Attributes:
        graph: Takes the region's inputs and returns its outputs; it has no owner yet.
        node_map: From the nodes that are directly in the region, and the outer ones that it
            reads, to the nodes of ``graph``. Outputs of called regions map to what carries them.
        calls: The ``call_module`` node of each region that this one calls.
        results: For each of those the nodes that carry its outputs: the call itself where one is
            returned bare, else one ``getitem`` each.
    """

    graph: Graph
    node_map: Mapping[Node, Node]
    calls: Mapping[Region, Node]
    results: Mapping[Region, tuple[Node, ...]]


class Call(NamedTuple):
    """The call of a region.

    Attributes:
        node: The ``call_module`` node.
        results: The nodes that carry the region's outputs.
        nodes: All nodes that the call is made of, in order.
    """

    node: Node
    results: tuple[Node, ...]
    nodes: tuple[Node, ...]


class GraphBuilder:
    """Builds the graph of any region, once all checks have passed.

    Args:
        graph: The graph that the regions are cut out of; it is only read.
        tree: The regions.
        boundary: Their borders.
        schedule: The order of their bodies.
        attribute_name: See ``outline``.
    """

    def __init__(
        self,
        graph: Graph,
        tree: RegionTree,
        boundary: Boundary,
        schedule: Schedule,
        attribute_name: AttributeName | None,
    ) -> None:
        self.graph = graph
        self.tree = tree
        self.boundary = boundary
        self.schedule = schedule
        self.attribute_name = attribute_name
        self.calls: dict[int, Call] = {}

    def build(self, index: int) -> tuple[Graph, dict[Node, Node]]:
        """Return a new graph of one region, and the map into it."""
        graph, env = Graph(), dict[Node, Node]()
        for outer in self.boundary.inputs[index]:
            name = outer.name
            placeholder = add_node(graph, "placeholder", name, (), name, type_expr=outer.type)
            placeholder.meta.update(value_meta(outer.meta))
            env[outer] = placeholder
        for outer, name in self.boundary.local[index].items():
            _read(outer, name, graph, env)
        self._fill(index, self.tree.members[index], graph, env)
        outputs = tuple(self.boundary.outputs[index])
        bare = self.is_bare(index)
        result = env[outputs[0]] if bare else tuple(env[node] for node in outputs)
        output = add_node(graph, "output", "output", (result,), "output")
        if outputs:
            output.meta.update(call_meta(outputs, bare=bare))
        return graph, env

    def build_root(self) -> tuple[Graph, dict[Node, Node]]:
        """Return a new outermost graph, and the map into it."""
        graph, env = Graph(), dict[Node, Node]()
        share_codegen(self.graph, graph)
        nodes = self._replace_placeholders(self.root_nodes(), graph, env)
        self._fill(ROOT, nodes, graph, env)
        return graph, env

    def root_nodes(self) -> list[Node]:
        """Return the nodes that are in no region."""
        region_of = self.tree.region_of
        return [node for node in self.tree.nodes if node not in region_of]

    def is_bare(self, index: int) -> bool:
        """Return whether a region returns its one output without a tuple around it."""
        region = self.tree.regions[index]
        return (
            region is not None
            and not region.always_return_tuple
            and len(self.boundary.outputs[index]) == 1
        )

    def call(self, index: int, graph: Graph, env: dict[Node, Node]) -> None:
        """Create a region's call and what unpacks it, at the graph's insert point.

        Args:
            index: The region.
            graph: The graph of its parent.
            env: From outer nodes to those of ``graph``, where they differ. The outputs are added.
        """
        outputs = tuple(self.boundary.outputs[index])
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

    def _replace_placeholders(
        self, nodes: Sequence[Node], graph: Graph, env: dict[Node, Node]
    ) -> Sequence[Node]:
        """Make the outermost graph read by attribute what the caller has a name for.

        Returns those of ``nodes`` that are still to be copied.
        """
        name_of, region_of = self.attribute_name, self.tree.region_of
        placeholders = [node for node in nodes if node.op == "placeholder"]
        names = {node: name_of(None, node) for node in placeholders} if name_of is not None else {}
        if not any(names.values()):
            return nodes
        # Placeholders first: fx wants them before everything else, reads of attributes too.
        for node in placeholders:
            if names[node] is None:
                env[node] = copy_node(graph, node, env)
        for node, name in names.items():
            if name is not None and any(user not in region_of for user in node.users):
                _read(node, name, graph, env)
        return [node for node in nodes if node not in names]

    def _fill(
        self, index: int, nodes: Sequence[Node], graph: Graph, env: dict[Node, Node]
    ) -> None:
        region = self.tree.regions[index]
        for item in self.schedule.body(index, nodes):
            if isinstance(item, int):
                self.call(item, graph, env)
                continue
            copy = copy_node(graph, item, env)
            env[item] = copy
            if self.attribute_name is not None and item.op in {"get_attr", "call_module"}:
                name = self.attribute_name(region, item)
                if name is not None:
                    copy.target = name


def call_label(name: str) -> str:
    """Return the name wanted for the call of the region of this name."""
    label = read_label(name)
    return label if label.isidentifier() else f"_{label}"


def read_label(path: str) -> str:
    """Return the name wanted for the node that reads the attribute at a dotted path."""
    return path.replace(".", "_")


def _read(outer: Node, name: str, graph: Graph, env: dict[Node, Node]) -> None:
    read = add_node(graph, "get_attr", name, (), read_label(name), outer.type)
    read.meta.update(outer.meta if outer.op == "get_attr" else value_meta(outer.meta))
    env[outer] = read
