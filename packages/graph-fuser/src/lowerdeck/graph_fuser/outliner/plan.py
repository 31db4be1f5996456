"""Inputs, outputs and orders of regions, computed before building."""

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
    """Boundary and body order of each region; created by ``plan_outline``.

    The input is validated, but no module is built. A plan is valid until the graph changes.

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
        """Return the outer nodes that the region reads, in order."""
        return self._boundary.inputs[self._index[region]]

    def outputs(self, region: Region) -> tuple[Node, ...]:
        """Return the inner nodes that the region returns, in order."""
        return self._boundary.outputs[self._index[region]]

    def returns_bare(self, region: Region) -> bool:
        """Return whether the region returns its single output without a tuple."""
        return self._graphs.is_bare(self._index[region])

    def steps(self, region: Region | None) -> list[Node | Region]:
        """Return the nodes and called regions of a region's body in final order.

        Args:
            region: The region, or None for the root.
        """
        index, tree = self._index[region], self._tree
        nodes = tree.members[index]
        # ``members`` of the root are not collected: most callers do not need them.
        if index == ROOT:
            nodes = [node for node in tree.nodes if node not in tree.region_of]
        # Fast path: most regions of a large model have no child regions.
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
    """Return the plan of ``outline`` for ``regions`` without building or changing anything.

    Args:
        gm: The graph module or graph, topologically sorted.
        order: Additional (before, after) node pairs whose order must be preserved, besides writes,
            random ops and other side effects.

    Raises:
        CycleError: Outlining would create a dependency cycle; the error has its nodes.
        RegionError: The tree is invalid.

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
