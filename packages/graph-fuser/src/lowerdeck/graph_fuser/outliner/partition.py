"""Fuse flat groups of nodes: the entry points for partitions."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from lowerdeck.graph_fuser.errors import CycleError, RegionError
from lowerdeck.graph_fuser.order import check_legal
from lowerdeck.graph_fuser.outliner.boundary import InputOrder
from lowerdeck.graph_fuser.outliner.outlined import OutlinedRegion
from lowerdeck.graph_fuser.outliner.outlining import outline
from lowerdeck.graph_fuser.outliner.plan import prepare
from lowerdeck.graph_fuser.regions import Region


@dataclass(frozen=True, slots=True)
class FusedPartition:
    """What became of one partition.

    Attributes:
        module: The submodule that holds the partition's nodes.
        call_node: The node that calls it.
        inputs: The nodes of the parent's graph that are passed, in the order of the placeholders.
        outputs: The nodes of the parent's graph that carry the results, in the order of the
            output.
        original_outputs: The partition's own nodes whose values ``outputs`` carry; erased from the
            graph, but with their names and meta.
        node_map: From the partition's nodes, and the outer nodes it read, to the submodule's
            nodes.
    """

    module: GraphModule
    call_node: Node
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    original_outputs: tuple[Node, ...]
    node_map: Mapping[Node, Node]


def validate_partition(partition: Iterable[Node]) -> bool:
    """Return whether ``partition`` could become one call: no path leaves it and comes back.

    Args:
        partition: Nodes of one graph.

    Raises:
        RegionError: The graph is out of order: call ``legalize_graph`` first.

    Example:
        >>> import torch
        >>> gm = torch.fx.symbolic_trace(lambda x: (x + 1).relu().sin())
        >>> _, add, relu, sin, _ = gm.graph.nodes
        >>> validate_partition([add, relu]), validate_partition([add, sin])
        (True, False)
    """
    nodes = list(dict.fromkeys(partition))
    if not nodes:
        return True
    graph = nodes[0].graph
    check_legal(graph)
    try:
        prepare(graph, [Region("partition", nodes)])
    except CycleError:
        return False
    return True


def fuse_partitions(
    gm: GraphModule,
    partitions: Mapping[str, Sequence[Node]],
    *,
    input_order: InputOrder = "parent",
    always_return_tuple: bool = False,
) -> dict[str, FusedPartition]:
    """Replace each partition by a call of a submodule, all in one pass, and return what was made.

    Args:
        gm: The graph module, changed in place; its code is generated again at its next use.
        partitions: From each submodule's name to its nodes, in any order.
        always_return_tuple: Return a tuple even for one output.

    Raises:
        CycleError: The partitions would depend on each other in a circle.
        RegionError: See ``outline``. After an error ``gm`` is as before.

    Example:
        >>> import torch
        >>> gm = torch.fx.symbolic_trace(lambda x: (x + 1).relu().sin())
        >>> _, add, relu, sin, _ = gm.graph.nodes
        >>> fused = fuse_partitions(gm, {"block": [add, relu]})["block"]
        >>> fused.inputs, fused.outputs
        ((x,), (block,))
        >>> gm(torch.zeros(1))
        tensor([0.8415])
    """
    if not isinstance(partitions, Mapping):
        raise RegionError(
            f"found a {type(partitions).__name__} of partitions; expected a mapping from each "
            "submodule's name to its nodes, such as propose_partitions(...).named()."
        )
    regions = {
        name: Region(name, nodes, always_return_tuple=always_return_tuple)
        for name, nodes in partitions.items()
    }
    outlined = outline(gm, list(regions.values()), input_order=input_order)
    return {name: _fused(outlined[region]) for name, region in regions.items()}


def _fused(outlined: OutlinedRegion) -> FusedPartition:
    return FusedPartition(
        module=outlined.module,
        call_node=outlined.call_node,
        inputs=outlined.arguments,
        outputs=outlined.results,
        original_outputs=outlined.outputs,
        node_map=outlined.node_map,
    )


def create_submodule_from_nodes(
    gm: GraphModule,
    node_list: Sequence[Node],
    tag: str,
    skip_legalize_graph: bool = False,
    *,
    input_order: InputOrder = "parent",
) -> tuple[GraphModule, Node]:
    """Move ``node_list`` into the submodule ``fused_<tag>``; return it and the node that calls it.

    A drop-in for ExecuTorch's function of this name. The submodule returns a flat list; a result
    that is itself a list or tuple, alone, is opened into its elements.

    Args:
        gm: The graph module, changed in place; its code is generated again at its next use.
        node_list: The nodes, in any order.
        tag: End of the submodule's name.
        skip_legalize_graph: Accepted for compatibility. Nodes that need not move are never moved,
            so that there is nothing to skip.
        input_order: See ``outline``; ExecuTorch's order is ``"first_use"``.

    Raises:
        CycleError: The nodes would need their own results.
        RegionError: See ``outline``. After an error ``gm`` is as before.

    Example:
        >>> import torch
        >>> gm = torch.fx.symbolic_trace(lambda x: (x + 1).relu().sin())
        >>> _, add, relu, sin, _ = gm.graph.nodes
        >>> submodule, call = create_submodule_from_nodes(gm, [add, relu], "tag0")
        >>> call.target, [node.name for node in submodule.graph.nodes]
        ('fused_tag0', ['x', 'add', 'relu', 'output'])
    """
    del skip_legalize_graph
    region = Region(f"fused_{tag}", node_list, always_return_tuple=True)
    fused = _fused(outline(gm, [region], input_order=input_order)[region])
    # A list, as ExecuTorch's function leaves it, where torch's fuser has a tuple.
    output = fused.module.graph.output_node()
    output.args = (list(output.args[0]),)  # type: ignore[arg-type]
    if len(fused.outputs) == 1:
        _open_sequence(fused)
    return fused.module, fused.call_node


def _open_sequence(fused: FusedPartition) -> None:
    """Return the elements of a lone list-valued result, and let its readers read the call."""
    (old,), (part,) = fused.original_outputs, fused.outputs
    value = old.meta.get("val")
    if not isinstance(value, (list, tuple)):
        return
    graph = fused.module.graph
    inner, output = fused.node_map[old], graph.output_node()
    elements: list[Node] = []
    with graph.inserting_before(output):
        for index, element in enumerate(value):
            read = graph.call_function(operator.getitem, (inner, index))
            read.meta["val"] = element
            elements.append(read)
    output.args = (elements,)
    output.meta["val"] = tuple(value)
    fused.call_node.meta["val"] = tuple(value)
    part.replace_all_uses_with(fused.call_node)
    part.graph.erase_node(part)
