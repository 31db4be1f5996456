"""Choose which nodes to fuse: few partitions, provably free of cycles, in linear time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from torch.fx import GraphModule, Node
from torch.fx.passes.operator_support import OperatorSupportBase

from lowerdeck.graph_fuser.order import check_legal, order_hazards
from lowerdeck.graph_fuser.proposer.grouping import Candidates
from lowerdeck.graph_fuser.proposer.items import ItemGraph
from lowerdeck.graph_fuser.proposer.proposal import LeftOut, Proposal, Reason
from lowerdeck.graph_fuser.proposer.spreading import spread
from lowerdeck.torch_base import collector_held, is_getitem, restore_users

Supported: TypeAlias = Callable[[Node], bool] | OperatorSupportBase
"""Says whether a node may be fused: a predicate, or torch's operator support."""


def propose_partitions(
    gm: GraphModule,
    is_supported: Supported,
    *,
    groups: Sequence[Sequence[Node]] = (),
    min_nodes: int = 1,
) -> Proposal:
    """Return partitions of the supported nodes, and why each other node is left out.

    Partitions follow levels: a node's level is the number of times that the worst path to it
    returns from supported to unsupported and back to supported nodes. The nodes of one level can
    be one call, as no path from them returns to them, and no fewer partitions can do, as that
    worst path needs one for each return (``levels`` has the proof). Nodes that suit several levels
    go where the fewest values cross. Cost and memory are linear in nodes and edges. Whatever is
    proposed, ``fuse_partitions`` accepts.

    Args:
        gm: The graph module; not changed.
        is_supported: Whether a node may be fused. Inputs and the output are never asked about. The
            elements of a multi-output node go where it goes.
        groups: Nodes that stay together: all in one partition, or all left out. Where groups
            and unsupported nodes need each other in a circle, the later groups are left out.
        min_nodes: Leave out partitions with fewer computing nodes. ``getitem`` and ``get_attr``
            do not count.

    Raises:
        RegionError: A group contains something else than nodes of the graph, or the graph is out
            of order: call ``legalize_graph`` first.

    Example:
        >>> import torch
        >>> gm = torch.fx.symbolic_trace(lambda x: (x + 1).relu().sin().neg())
        >>> proposal = propose_partitions(gm, lambda node: node.target != "sin")
        >>> proposal.partitions
        ((add, relu), (neg,))
        >>> print(proposal.left_out[next(n for n in gm.graph.nodes if n.name == "sin")].detail)
        sin is not supported
    """
    restore_users(gm.graph)
    check_legal(gm.graph)
    nodes = list(gm.graph.nodes)
    candidates = Candidates(nodes, order_hazards(gm.graph, gm), predicate(gm, is_supported))
    with collector_held():
        items = candidates.items(groups)
        level = spread(items)
        partitions = _collect(items, level, nodes)
    left_out = candidates.left_out
    kept = _large_enough(partitions, min_nodes, left_out)
    return Proposal(tuple(kept), {node: left_out[node] for node in nodes if node in left_out})


def predicate(gm: GraphModule, is_supported: Supported) -> Callable[[Node], bool]:
    """Return ``is_supported`` as a predicate on nodes."""
    if isinstance(is_supported, OperatorSupportBase):
        support = is_supported
        # Collected once: torch's partitioner does it again for each node.
        submodules = dict(gm.named_modules())
        return lambda node: support.is_node_supported(submodules, node)
    return is_supported


def _collect(items: ItemGraph, level: Sequence[int], nodes: Sequence[Node]) -> list[list[Node]]:
    """Return the nodes of each level that may be fused, in the graph's order."""
    partitions: dict[int, list[Node]] = {}
    for item, members in enumerate(items.nodes):
        if items.wanted[item]:
            partitions.setdefault(level[item], []).extend(members)
    position = {node: number for number, node in enumerate(nodes)}
    return [sorted(partitions[key], key=position.__getitem__) for key in sorted(partitions)]


def _large_enough(
    partitions: Sequence[Sequence[Node]],
    min_nodes: int,
    left_out: dict[Node, LeftOut],
) -> list[tuple[Node, ...]]:
    kept: list[tuple[Node, ...]] = []
    for partition in partitions:
        # As in torch: attributes and elements alone are not worth a partition.
        size = sum(node.op != "get_attr" and not is_getitem(node) for node in partition)
        if size >= min_nodes:
            kept.append(tuple(partition))
            continue
        for node in partition:
            left_out[node] = LeftOut(
                Reason.TOO_SMALL,
                f"the partition of {node.name} would have {size} computing nodes, fewer than the "
                f"{min_nodes} asked for",
            )
    return kept
