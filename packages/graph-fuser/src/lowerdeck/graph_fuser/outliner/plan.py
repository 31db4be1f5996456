"""Plans: inputs, outputs and orders of regions, known before anything is built."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch.fx import Graph, GraphModule, Node

from lowerdeck.graph_fuser.order import check_legal, order_hazards
from lowerdeck.graph_fuser.outliner.boundary import InputOrder, find_boundary
from lowerdeck.graph_fuser.outliner.checks import check_names, checked_order
from lowerdeck.graph_fuser.outliner.region_graph import GraphBuilder
from lowerdeck.graph_fuser.outliner.schedule import Schedule
from lowerdeck.graph_fuser.regions import ROOT, Region, region_tree
from lowerdeck.torch_base import collector_held, restore_users


class OutlinePlan:
    """What crosses each region's border, and the order of its body; made by ``plan_outline``.

    Everything is checked, and nothing is built. A plan is valid as long as the graph that it was
    made for does not change.

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
        return self._boundary.inputs[self._index[region]]

    def outputs(self, region: Region) -> tuple[Node, ...]:
        """Return the inner nodes whose values the region returns, in order."""
        return self._boundary.outputs[self._index[region]]

    def returns_bare(self, region: Region) -> bool:
        """Return whether the region returns its one output without a tuple around it."""
        return self._graphs.is_bare(self._index[region])

    def steps(self, region: Region | None) -> list[Node | Region]:
        """Return the body of a region in its final order: nodes, and regions that it calls.

        Args:
            region: The region; None for what is outside of all.
        """
        index, tree = self._index[region], self._tree
        nodes = tree.members[index]
        # ``members`` of the root are not collected, since most callers do not need them.
        if index == ROOT:
            nodes = [node for node in tree.nodes if node not in tree.region_of]
        # Most regions of a large model call none: their bodies hold nodes alone, with no index to
        # turn into a region.
        if not tree.children[index]:
            return nodes  # type: ignore[return-value]
        return [
            tree.regions[item] if isinstance(item, int) else item  # type: ignore[misc]
            for item in self._graphs.schedule.body(index, nodes)
        ]


def plan_outline(
    gm: GraphModule | Graph,
    regions: Sequence[Region],
    *,
    input_order: InputOrder = "parent",
    order: Iterable[tuple[Node, Node]] = (),
) -> OutlinePlan:
    """Return what ``outline`` would make of ``regions``, without building or changing anything.

    Args:
        gm: The graph module, or a bare graph, in an order in which it can run.
        order: Pairs of nodes (before, after) that must keep their order though no value flows
            between them, in addition to those found here (writes, random draws, other effects).

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
    """
    with collector_held():
        check_legal(gm if isinstance(gm, Graph) else gm.graph)
        graphs = prepare(gm, regions, input_order, order)
        check_names(graphs.tree)
    return OutlinePlan(graphs)


def prepare(
    gm: GraphModule | Graph,
    regions: Sequence[Region],
    input_order: InputOrder = "parent",
    order: Iterable[tuple[Node, Node]] = (),
) -> GraphBuilder:
    """Return the builder of the regions' graphs; see ``plan_outline``."""
    graph, module = (gm, gm.owning_module) if isinstance(gm, Graph) else (gm.graph, gm)
    restore_users(graph)
    tree = region_tree(graph, regions)
    hazards = [*order_hazards(graph, module), *checked_order(order, tree)]
    boundary, edges = find_boundary(tree, order=hazards, input_order=input_order)
    schedule = Schedule(tree, edges, hazards)
    return GraphBuilder(graph, tree, boundary, schedule)
