"""Propose few, provably acyclic partitions."""

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
"""A predicate on nodes, or torch's operator support."""


def propose_partitions(
    gm: GraphModule,
    is_supported: Supported,
    *,
    groups: Sequence[Sequence[Node]] = (),
    min_nodes: int = 1,
) -> Proposal:
    """Return partitions of the supported nodes, with a reason for each excluded node.

    Partitions follow levels: a node's least level is the largest number of times that a path to it
    leaves supported nodes for unsupported ones and returns. Nodes of one level form a convex
    partition, and the number of partitions is minimal (proof in ``levels``). Nodes that fit
    several levels go to one with few boundary values. Time and memory are linear in
    nodes and edges; groups on cycles add a factor of at most log(groups) to the time.
    ``fuse_partitions`` accepts every proposal.

    Args:
        gm: The graph module; not changed.
        is_supported: Whether a node may be fused; not called for inputs and the output. getitem of
            a multi-output node follows its producer.
        groups: Groups of nodes; each group is in one partition or excluded as a whole. If groups
            and unsupported nodes form a dependency cycle, the later groups are dropped.
        min_nodes: Drop partitions with fewer computing nodes. ``getitem`` and ``get_attr`` do not
            count.

    Raises:
        RegionError: A group contains anything but nodes of the graph, or the graph is not
            topologically sorted (call ``legalize_graph``).

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
        # Collected once; torch's partitioner recomputes them for each node.
        submodules = dict(gm.named_modules())
        return lambda node: support.is_node_supported(submodules, node)
    return is_supported


def _collect(items: ItemGraph, level: Sequence[int], nodes: Sequence[Node]) -> list[list[Node]]:
    """Return the fusible nodes of each level, in graph order."""
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
        # As in torch, ``get_attr`` and ``getitem`` nodes alone form no partition.
        size = sum(node.op != "get_attr" and not is_getitem(node) for node in partition)
        if size >= min_nodes:
            kept.append(tuple(partition))
            continue
        for node in partition:
            left_out[node] = LeftOut(
                Reason.TOO_SMALL,
                f"the partition of {node.name} would have {size} computing nodes, fewer than "
                f"min_nodes={min_nodes}",
            )
    return kept
