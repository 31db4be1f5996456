"""torch's fusion functions, built on the outliner."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence

import torch
from torch.fx import GraphModule, Node

from lowerdeck.graph_fuser._torch_private import defer_code
from lowerdeck.graph_fuser.errors import RegionError
from lowerdeck.graph_fuser.order import call_meta, install, legalize_graph, topo_sort, value_meta
from lowerdeck.graph_fuser.outliner import (
    InputOrder,
    check_free,
    extract,
    fuse_partitions,
    replace_inputs,
)
from lowerdeck.graph_fuser.regions import Region
from lowerdeck.torch_base import restore_users


def fuse_as_graphmodule(
    gm: GraphModule,
    nodes: Sequence[Node],
    module_name: str,
    partition_lookup_table: Mapping[Node, int | None] | None = None,
    *,
    always_return_tuple: bool = False,
    input_order: InputOrder = "parent",
) -> tuple[GraphModule, tuple[Node, ...], tuple[Node, ...]]:
    """Return ``nodes`` as a graph module, with its input and output nodes.

    A drop-in for ``torch.fx.passes.utils.fuser_utils.fuse_as_graphmodule``. ``gm`` is not changed.

    Args:
        nodes: The nodes in any order; the new graph keeps the order of ``gm``.
        module_name: Class name of the new module.
        partition_lookup_table: Ignored, for compatibility.
        always_return_tuple: Return a tuple even for one output.
        input_order: Order of inputs, as in ``outline``. torch has ``"first_use"``; since 2.14,
            ``"parent"`` if each input is a placeholder of ``gm``.

    Returns:
        The module, and its input and output nodes in ``gm``.

    Raises:
        CycleError: The nodes are not convex.
        RegionError: A node is foreign, erased or repeated, or ``nodes`` is empty.

    Example:
        >>> import torch
        >>> gm = torch.fx.symbolic_trace(lambda x: (x + 1).relu().sin())
        >>> _, add, relu, _, _ = gm.graph.nodes
        >>> module, inputs, outputs = fuse_as_graphmodule(gm, [add, relu], "Block")
        >>> inputs, outputs, module(torch.zeros(1))
        ((x,), (relu,), tensor([1.]))
    """
    del partition_lookup_table
    region = Region(module_name, nodes, always_return_tuple=always_return_tuple)
    return extract(gm, region, input_order=input_order)


def insert_subgm(
    gm: GraphModule,
    sub_gm: GraphModule,
    orig_inputs: Sequence[Node],
    orig_outputs: Sequence[Node],
    insertion_point: Node | None = None,
) -> GraphModule:
    """Call ``sub_gm`` in ``gm`` in place of ``orig_outputs``; return ``gm``.

    A drop-in for torch's function of this name. The original nodes stay; erase them with
    ``erase_nodes``. Users before the call move after it.

    Args:
        gm: The graph module, changed in place; its code is regenerated at its next use.
        sub_gm: The module, installed under its class name.
        orig_inputs: Argument nodes.
        orig_outputs: Nodes that the results of ``sub_gm`` replace; may be empty.
        insertion_point: Node after which to call it; by default the last of ``orig_outputs``, or
            of ``orig_inputs`` if there are no outputs.

    Raises:
        RegionError: A node is foreign or erased, or the name is in use. ``gm`` is unchanged.
        CycleError: An input depends on an output that is replaced; ``gm`` is then changed.

    Example:
        >>> import torch
        >>> gm = torch.fx.symbolic_trace(lambda x: (x + 1).relu().sin())
        >>> _, add, relu, _, _ = gm.graph.nodes
        >>> module, inputs, outputs = fuse_as_graphmodule(gm, [add, relu], "Block")
        >>> erase_nodes(insert_subgm(gm, module, inputs, outputs), [add, relu])
        >>> [node.name for node in gm.graph.nodes]
        ['x', 'block', 'sin', 'output']
    """
    restore_users(gm.graph)
    position = {node: number for number, node in enumerate(gm.graph.nodes)}
    insertion_points = [] if insertion_point is None else [insertion_point]
    _check_present(gm, [*orig_inputs, *orig_outputs, *insertion_points], position)
    name = type(sub_gm).__name__
    check_free(gm, [name])
    # All inputs of a convex node set precede its last output.
    if insertion_point is None:
        ends = orig_outputs or [*orig_inputs, *list(position)[:1]]
        insertion_point = max(ends, key=position.__getitem__)
    install(gm, name, sub_gm)
    returned = sub_gm.graph.output_node().args[0]
    bare = len(orig_outputs) == 1 and not isinstance(returned, tuple)
    graph = gm.graph
    replacement: dict[Node, Node] = {}
    with graph.inserting_before(insertion_point.next):
        call = graph.call_module(name, tuple(orig_inputs))
        call.meta.update(call_meta(orig_outputs, bare=bare))
        if bare:
            replacement[orig_outputs[0]] = call
        else:
            for index, node in enumerate(orig_outputs):
                part = graph.call_function(operator.getitem, (call, index), type_expr=node.type)
                part.meta.update(value_meta(node.meta))
                replacement[node] = part
    readers: dict[Node, dict[Node, Node]] = {}
    for old, new in replacement.items():
        for user in old.users:
            if user is not call:
                readers.setdefault(user, {})[old] = new
    for user, changes in readers.items():
        replace_inputs(user, changes)
    defer_code(gm)
    return legalize_graph(gm)


def erase_nodes(gm: GraphModule, nodes: Collection[Node]) -> None:
    """Erase ``nodes`` from ``gm``, all or none.

    Args:
        gm: The graph module, changed in place; its code is regenerated at its next use.
        nodes: The nodes, in any order.

    Raises:
        RegionError: Another node uses one of them, or one is foreign or erased. ``gm`` is
            unchanged.
    """
    restore_users(gm.graph)
    doomed = dict.fromkeys(nodes)
    _check_present(gm, list(doomed), dict.fromkeys(gm.graph.nodes))
    for node in doomed:
        reader = next((user for user in node.users if user not in doomed), None)
        if reader is not None:
            raise RegionError(
                f"Node {node.name!r} cannot be erased: {reader.name!r} uses it and stays; "
                "replace its uses first."
            )
    # Users first: a node with users cannot be erased.
    for node in reversed(topo_sort(list(doomed))):
        gm.graph.erase_node(node)
    defer_code(gm)


def fuse_by_partitions(
    gm: GraphModule,
    partitions: Sequence[Mapping[Node, int | None]],
    prefix: str = "fused_",
    always_return_tuple: bool = False,
    *,
    input_order: InputOrder = "parent",
) -> GraphModule:
    """Replace each partition by a numbered submodule call; return ``gm``.

    A drop-in for torch's function of this name; all partitions are fused in one pass, or none.

    Args:
        gm: The graph module, changed in place; its code is regenerated at its next use.
        partitions: Mappings whose keys are the nodes of a partition.
        prefix: Prefix of the submodules' names.
        always_return_tuple: Return a tuple even for one output.
        input_order: Order of inputs, as in ``outline``. torch has ``"first_use"``; since 2.14,
            ``"parent"`` if each input is a placeholder of ``gm``.

    Raises:
        CycleError: The partitions would form a dependency cycle.
        RegionError: See ``outline``. ``gm`` is at most sorted.

    Example:
        >>> import torch
        >>> gm = torch.fx.symbolic_trace(lambda x: (x + 1).relu().sin())
        >>> _, add, relu, _, _ = gm.graph.nodes
        >>> gm = fuse_by_partitions(gm, [{add: None, relu: None}])
        >>> [node.name for node in gm.graph.nodes]
        ['x', 'fused_0', 'sin', 'output']
    """
    named = {f"{prefix}{number}": list(nodes) for number, nodes in enumerate(partitions)}
    fuse_partitions(gm, named, input_order=input_order, always_return_tuple=always_return_tuple)
    return gm


def _check_present(
    gm: torch.fx.GraphModule, nodes: Sequence[Node], present: Mapping[Node, object]
) -> None:
    for node in nodes:
        if node in present:
            continue
        if node.graph is gm.graph:
            raise RegionError(f"Node {node.name!r} was erased; expected nodes still in the graph.")
        raise RegionError(
            f"Node {node.name!r} belongs to another graph; expected nodes of the module that was "
            "passed."
        )
