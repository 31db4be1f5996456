"""Outline a tree of regions into nested graph modules in one pass."""

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
    """Outline each region into a submodule; return the results in preorder.

    One walk over the edges finds all boundaries and one over the nodes builds the graphs: O(nodes
    + edges x depth) for any number of regions. All input is validated before any mutation except
    the sort of an unsorted graph. Nodes outside of regions stay the same objects; a node moves
    only if it would precede a new dependency.

    Args:
        gm: The graph module, changed in place; its code is regenerated at its next use. An
            unsorted graph is legalized first.
        regions: The outermost regions, which may have children.
        input_order: Order of the inputs: ``"parent"`` for the parent's graph order,
            ``"first_use"`` for the region's order of use.

    Returns:
        Module, call, inputs, outputs and node map of each region.

    Raises:
        CycleError: Outlining would create a dependency cycle; the error has its nodes.
        RegionError: The tree is invalid (a node is foreign, erased, repeated or shared; a name is
            in use).

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
    """Return the module, inputs and outputs of one region without changing ``gm``.

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
