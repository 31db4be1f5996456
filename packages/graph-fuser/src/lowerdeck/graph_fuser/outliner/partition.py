"""Entry points that fuse flat node partitions."""

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
    """Submodule, call and boundary of a fused partition.

    Attributes:
        module: The submodule that holds the partition's nodes.
        call_node: The ``call_module`` node.
        inputs: Argument nodes of the parent's graph, in placeholder order.
        outputs: Result nodes of the parent's graph, in output order.
        original_outputs: Nodes of the partition that ``outputs`` replace; erased from the graph,
            with name and meta intact.
        node_map: Maps the partition's nodes and inputs to the submodule's nodes.
    """

    module: GraphModule
    call_node: Node
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    original_outputs: tuple[Node, ...]
    node_map: Mapping[Node, Node]


def validate_partition(partition: Iterable[Node]) -> bool:
    """Return whether ``partition`` is convex: no path leaves and reenters it.

    Args:
        partition: Nodes of one graph.

    Raises:
        RegionError: The graph is not topologically sorted; call ``legalize_graph``.

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
    """Replace each partition by a submodule call in one pass; return the results by name.

    Args:
        gm: The graph module, changed in place; its code is regenerated at its next use.
        partitions: Maps each submodule's name to its nodes, in any order.
        input_order: See ``outline``.
        always_return_tuple: Return a tuple even for one output.

    Raises:
        CycleError: The partitions would form a dependency cycle.
        RegionError: See ``outline``. ``gm`` is at most sorted.

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
    """Move ``node_list`` into the submodule ``fused_<tag>``; return it and its call node.

    A drop-in for ExecuTorch's function of this name. The submodule returns a flat list; a single
    list or tuple result is flattened into it.

    Args:
        gm: The graph module, changed in place; its code is regenerated at its next use.
        node_list: The nodes, in any order.
        tag: Suffix of the submodule's name.
        skip_legalize_graph: Ignored, for compatibility; only nodes out of order are moved.
        input_order: See ``outline``; ExecuTorch's order is ``"first_use"``.

    Raises:
        CycleError: The nodes are not convex.
        RegionError: See ``outline``. ``gm`` is at most sorted.

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
    # A list as in ExecuTorch; torch's fuser returns a tuple.
    output = fused.module.graph.output_node()
    output.args = (list(output.args[0]),)  # type: ignore[arg-type]
    if len(fused.outputs) == 1:
        _open_sequence(fused)
    return fused.module, fused.call_node


def _open_sequence(fused: FusedPartition) -> None:
    """Flatten a single list-valued result: redirect its users to the call, return its elements."""
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
