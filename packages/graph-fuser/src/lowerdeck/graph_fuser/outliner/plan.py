"""Plans: inputs, outputs and orders of regions, known before anything is built."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch.fx import Graph, GraphModule, Node

from lowerdeck.graph_fuser.order import check_legal, order_hazards
from lowerdeck.graph_fuser.outliner.boundary import AttributeName, InputOrder, find_boundary
from lowerdeck.graph_fuser.outliner.checks import check_names, checked_order
from lowerdeck.graph_fuser.outliner.region_graph import GraphBuilder, RegionGraph
from lowerdeck.graph_fuser.outliner.schedule import Schedule
from lowerdeck.graph_fuser.regions import ROOT, Region, region_tree
from lowerdeck.torch_base import collector_held, mend_readers


class OutlinePlan:
    """What crosses each region's border, and the order of its body; made by ``plan_outline``.

    Everything is checked, and nothing is built: ``graph`` builds the graph of one region. A plan
    is valid as long as the graph that it was made for does not change.

    Attributes:
        regions: All regions, parents before their children.
    """

    def __init__(self, graphs: GraphBuilder) -> None:
        self._graphs = graphs
        self._tree = graphs.tree
        self._boundary = graphs.boundary
        self._index: dict[Region | None, int] = {
            region: index for index, region in enumerate(graphs.tree.regions)
        }
        self.regions: tuple[Region, ...] = tuple(
            region for region in graphs.tree.regions if region is not None
        )

    def inputs(self, region: Region) -> tuple[Node, ...]:
        """Return the outer nodes whose values the region takes, in order."""
        return tuple(self._boundary.inputs[self._index[region]])

    def outputs(self, region: Region) -> tuple[Node, ...]:
        """Return the inner nodes whose values the region returns, in order."""
        return tuple(self._boundary.outputs[self._index[region]])

    def attributes(self, region: Region) -> Mapping[Node, str]:
        """Return the outer nodes that the region reads by an attribute of its own, in order."""
        return self._boundary.local[self._index[region]]

    def returns_bare(self, region: Region) -> bool:
        """Return whether the region returns its one output without a tuple around it."""
        return self._graphs.is_bare(self._index[region])

    def steps(self, region: Region | None) -> list[Node | Region]:
        """Return the body of a region in its final order: nodes, and regions that it calls.

        Args:
            region: The region; None for what is outside of all.
        """
        index, tree = self._index[region], self._tree
        nodes = self._graphs.root_nodes() if index == ROOT else tree.members[index]
        # Most regions of a large model call none: their bodies hold nodes alone, with no index to
        # turn into a region.
        if not tree.children[index]:
            return nodes  # type: ignore[return-value]
        return [
            tree.regions[item] if isinstance(item, int) else item  # type: ignore[misc]
            for item in self._graphs.schedule.body(index, nodes)
        ]

    def graph(self, region: Region | None) -> RegionGraph:
        """Return a new graph of a region, without an owner.

        Args:
            region: The region; None for the outermost graph.
        """
        index, tree = self._index[region], self._tree
        graph, env = self._graphs.build_root() if index == ROOT else self._graphs.build(index)
        called = {tree.regions[child]: self._graphs.calls[child] for child in tree.children[index]}
        calls = {inner: call for inner, call in called.items() if inner is not None}
        return RegionGraph(
            graph,
            env,
            {inner: call.node for inner, call in calls.items()},
            {inner: call.results for inner, call in calls.items()},
        )


def plan_outline(
    gm: GraphModule | Graph,
    regions: Sequence[Region],
    *,
    input_order: InputOrder = "parent",
    order: Iterable[tuple[Node, Node]] = (),
    attribute_name: AttributeName | None = None,
) -> OutlinePlan:
    """Return what ``outline`` would make of ``regions``, without building or changing anything.

    Args:
        gm: The graph module, or a bare graph, in an order in which it can run.
        regions: See ``outline``.
        input_order: See ``outline``.
        order: Pairs of nodes (before, after) that must keep their order though no value flows
            between them, in addition to those found here (writes, random draws, other effects).
        attribute_name: Called with a region (None: the root) and a node. For a ``get_attr`` or
            ``call_module`` node of the region it returns the target to use in the region's graph
            (None: as it is). For a ``get_attr`` or ``placeholder`` node outside it returns the
            attribute by which the region reads that value, which then is no input (None: pass it
            as an input). For a placeholder and the root it returns the attribute that takes its
            place in the outermost graph.

    Raises:
        CycleError: A region would need its own result; the error shows the path node by node.
        RegionError: The tree is not sound; each case has a subclass.

    Example:
        >>> import torch
        >>> gm = torch.fx.symbolic_trace(lambda x: (x.relu() + 1).relu() + 1)
        >>> _, relu, add, relu_1, add_1, _ = gm.graph.nodes
        >>> one, two = Region("one", [relu, add]), Region("two", [relu_1, add_1])
        >>> plan = plan_outline(gm, [one, two])
        >>> plan.steps(None)[2] is two, plan.steps(two), plan.inputs(two)
        (True, [relu_1, add_1], (add,))
        >>> [node.name for node in plan.graph(two).graph.nodes]
        ['add', 'relu_1', 'add_1', 'output']
    """
    with collector_held():
        check_legal(gm if isinstance(gm, Graph) else gm.graph)
        graphs = prepare(gm, regions, input_order, order, attribute_name)
        check_names(graphs.tree)
    return OutlinePlan(graphs)


def prepare(
    gm: GraphModule | Graph,
    regions: Sequence[Region],
    input_order: InputOrder = "parent",
    order: Iterable[tuple[Node, Node]] = (),
    attribute_name: AttributeName | None = None,
) -> GraphBuilder:
    """Return the builder of the regions' graphs; see ``plan_outline``."""
    graph, module = (gm, gm.owning_module) if isinstance(gm, Graph) else (gm.graph, gm)
    mend_readers(graph)
    tree = region_tree(graph, regions)
    hazards = [*order_hazards(graph, module), *checked_order(order, tree)]
    boundary = find_boundary(
        tree, order=hazards, input_order=input_order, attribute_name=attribute_name
    )
    schedule = Schedule(tree, boundary, hazards)
    return GraphBuilder(graph, tree, boundary, schedule, attribute_name)
