"""Turn a tree of regions into nested graph modules, in one pass."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import GraphModule, Node

from lowerdeck.graph_fuser.order import check_legal, legalize_graph
from lowerdeck.graph_fuser.outliner.boundary import InputOrder
from lowerdeck.graph_fuser.outliner.building import ModuleBuilder
from lowerdeck.graph_fuser.outliner.checks import check_attributes, check_inner_names, check_names
from lowerdeck.graph_fuser.outliner.outlined import OutlinedRegion
from lowerdeck.graph_fuser.outliner.plan import prepare
from lowerdeck.graph_fuser.regions import ROOT, Region
from lowerdeck.torch_base import collector_held


def outline(
    gm: GraphModule, regions: Sequence[Region], *, input_order: InputOrder = "parent"
) -> dict[Region, OutlinedRegion]:
    """Turn each region into a module that its parent calls, and return what became of each.

    Boundaries of all regions come from one walk over the edges and the new graphs from one walk
    over the nodes: O(nodes + edges x depth), whatever the number of regions. Everything is checked
    before anything changes. Nodes outside the regions stay the same objects in the same order,
    save those that come before something that they now depend on.

    Args:
        gm: The graph module, changed in place; its code is generated again at its next use. A
            graph whose nodes are out of order is legalized first.
        regions: The outermost regions; each may hold others.
        input_order: Order of the inputs: ``"parent"`` as the values are in the parent's graph,
            ``"first_use"`` as the region first reads them.

    Returns:
        For each region, in preorder, its module, call, inputs, outputs and node map.

    Raises:
        CycleError: A region would need its own result; the error shows the path node by node.
        RegionError: The tree is not sound (a node is foreign, erased, repeated or shared, a name
            is in use).

    Example:
        >>> import torch
        >>> class Model(torch.nn.Module):
        ...     def forward(self, x):
        ...         return (x.relu() + 1).sin()
        >>> gm = torch.fx.symbolic_trace(Model())
        >>> _, relu, add, sin, _ = gm.graph.nodes
        >>> inner = Region("inner", [add])
        >>> outlined = outline(gm, [Region("outer", [relu], children=[inner])])
        >>> [node.target for node in gm.graph.nodes if node.op == "call_module"]
        ['outer']
        >>> outlined[inner].inputs, outlined[inner].outputs
        ((relu,), (add,))
    """
    with collector_held():
        legalize_graph(gm)
        graphs = prepare(gm, regions, input_order)
        check_names(graphs.tree, gm)
        check_attributes(gm, graphs.tree)
        check_inner_names(graphs.tree)
        builder = ModuleBuilder(graphs, gm)
        for index in range(len(graphs.tree.regions) - 1, ROOT, -1):
            builder.build(index)
        builder.splice()
        return builder.collect()


def extract(
    gm: GraphModule, region: Region, *, input_order: InputOrder = "parent"
) -> tuple[GraphModule, tuple[Node, ...], tuple[Node, ...]]:
    """Return the module that one region would become, its inputs and its outputs; change nothing.

    Args:
        region: A region without children.

    Raises:
        RegionError: See ``outline``.
    """
    check_legal(gm.graph)
    graphs = prepare(gm, [region], input_order)
    check_attributes(gm, graphs.tree)
    module = ModuleBuilder(graphs, gm).build(1)
    return module, graphs.boundary.inputs[1], graphs.boundary.outputs[1]
