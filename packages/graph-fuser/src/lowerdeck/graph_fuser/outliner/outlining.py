"""Turn a tree of regions into nested graph modules, in one pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from lowerdeck.graph_fuser.errors import RegionError
from lowerdeck.graph_fuser.outliner.boundary import AttributeName, InputOrder
from lowerdeck.graph_fuser.outliner.building import MakeModule, ModuleBuilder
from lowerdeck.graph_fuser.outliner.checks import (
    check_attributes,
    check_inner_names,
    check_names,
)
from lowerdeck.graph_fuser.outliner.outlined import Outline
from lowerdeck.graph_fuser.outliner.plan import prepare
from lowerdeck.graph_fuser.regions import ROOT, Region
from lowerdeck.torch_base import collector_held


def outline(
    gm: GraphModule | Graph,
    regions: Sequence[Region],
    *,
    input_order: InputOrder = "parent",
    in_place: bool = True,
    order: Iterable[tuple[Node, Node]] = (),
    attribute_name: AttributeName | None = None,
    make_module: MakeModule | None = None,
    install_children: bool = True,
) -> Outline:
    """Turn each region into a module that its parent calls, and return what became of each.

    Boundaries of all regions come from one walk over the edges and the new graphs from one walk
    over the nodes: O(nodes + edges x depth), whatever the number of regions. Everything is checked
    before anything changes. Nodes outside the regions stay the same objects in the same order,
    save those that come before something that they now depend on.

    Args:
        gm: The graph module. Changed unless ``in_place`` is False; its code is generated again at
            its next use. A bare graph will do with ``in_place=False`` and ``make_module``.
        regions: The outermost regions; each may hold others.
        input_order: Order of the inputs: ``"parent"`` as the values are in the parent's graph,
            ``"first_use"`` as the region first reads them.
        in_place: Edit ``gm``; otherwise leave it alone and build a new outermost module.
        order: Pairs of nodes (before, after) that must keep their order though no value flows
            between them, beside those that are found here (writes, random draws, other effects).
        attribute_name: Called with a region (None: the root, only asked with ``in_place=False``)
            and a node. For a ``get_attr`` or ``call_module`` node of the region it returns the
            target to use in the region's module (None: as it is). For a ``get_attr`` or
            ``placeholder`` node outside it returns the attribute by which the region's module
            reads that value, which then is no input (None: pass it as an input). For a placeholder
            and the root it returns the attribute that takes its place in the outermost graph.
        make_module: Makes each module from its finished graph, children before parents; the
            default makes a ``GraphModule`` whose code is generated at its first use, with the
            attributes that its graph reads (shared with ``gm``, not copied).
        install_children: Install each region's module in its parent's (always with ``in_place``);
            a caller that builds a hierarchy of its own needs none.

    Returns:
        The outermost module, and for each region its module, call, inputs, outputs and node map.

    Raises:
        CycleError: A region would need its own result; the error shows the path node by node.
        RegionError: The tree is not sound (a node is foreign, erased, repeated or shared, a name
            is in use); each case has a subclass.

    Example:
        >>> import torch
        >>> class Model(torch.nn.Module):
        ...     def forward(self, x):
        ...         return (x.relu() + 1).sin()
        >>> gm = torch.fx.symbolic_trace(Model())
        >>> _, relu, add, sin, _ = gm.graph.nodes
        >>> inner = Region("inner", [add])
        >>> done = outline(gm, [Region("outer", [relu], children=[inner])])
        >>> [node.target for node in gm.graph.nodes if node.op == "call_module"]
        ['outer']
        >>> done.regions[inner].inputs, done.regions[inner].outputs
        ((relu,), (add,))
    """
    module = gm.owning_module if isinstance(gm, Graph) else gm
    if module is None and (in_place or make_module is None):
        raise RegionError(
            "A bare graph was passed; expected a graph module, or in_place=False with make_module."
        )
    with collector_held():
        graphs = prepare(
            gm, regions, input_order, order, attribute_name, rebuilds_root=not in_place
        )
        check_names(module if in_place else None, graphs.tree)
        if module is not None and make_module is None:
            check_attributes(module, graphs.tree, graphs.boundary)
            check_inner_names(graphs.tree, graphs.boundary, root_too=not in_place)
        builder = ModuleBuilder(
            graphs, module, make_module, install_children=install_children or in_place
        )
        for index in range(len(graphs.tree.regions) - 1, ROOT, -1):
            builder.build(index)
        if in_place and module is not None:
            root_map = builder.splice(module)
            return Outline(module, builder.collect(), root_map)
        outermost, root_map = builder.rebuild_root()
        return Outline(outermost, builder.collect(), root_map)


def extract(
    gm: GraphModule, region: Region, *, input_order: InputOrder = "parent"
) -> tuple[torch.nn.Module, tuple[Node, ...], tuple[Node, ...]]:
    """Return the module that one region would become, its inputs and its outputs; change nothing.

    Args:
        gm: The graph module.
        region: A region without children.
        input_order: See ``outline``.

    Raises:
        RegionError: See ``outline``.
    """
    graphs = prepare(gm, [region], input_order)
    check_attributes(gm, graphs.tree, graphs.boundary)
    module = ModuleBuilder(graphs, gm, None).build(1)
    return module, tuple(graphs.boundary.inputs[1]), tuple(graphs.boundary.outputs[1])
