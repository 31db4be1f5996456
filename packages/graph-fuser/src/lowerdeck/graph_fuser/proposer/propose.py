"""Choose which nodes to fuse: few partitions, provably free of cycles, in linear time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import TypeAlias

from torch.fx import GraphModule, Node
from torch.fx.passes.operator_support import OperatorSupportBase

from lowerdeck.graph_fuser.errors import RegionError
from lowerdeck.graph_fuser.order import followers, legal_order
from lowerdeck.graph_fuser.proposer.connecting import fewest_connected
from lowerdeck.graph_fuser.proposer.grouping import (
    check_nodes,
    follows_left_out,
    grouped_items,
    whole_groups,
)
from lowerdeck.graph_fuser.proposer.items import ItemGraph, keep_items_apart
from lowerdeck.graph_fuser.proposer.proposal import LeftOut, Proposal, Reason
from lowerdeck.graph_fuser.proposer.spreading import spread
from lowerdeck.graph_fuser.proposer.targets import qualified_name
from lowerdeck.torch_base import collector_held, is_getitem, mend_readers

Supported: TypeAlias = Callable[[Node], bool] | OperatorSupportBase
"""Says whether a node may be fused: a predicate, or torch's operator support."""


def propose_partitions(
    gm: GraphModule,
    is_supported: Supported,
    *,
    groups: Sequence[Sequence[Node]] = (),
    connected_only: bool = False,
    min_nodes: int = 1,
    non_compute_ops: Collection[object] = (),
    keep_apart: Sequence[Sequence[Node]] = (),
) -> Proposal:
    """Return partitions of the supported nodes, and why each other node is left out.

    Partitions follow levels: a node's level is the number of times that the worst path to it
    returns from supported to unsupported and back to supported nodes. The nodes of one level can
    be one call, as no path from them returns to them, and no fewer partitions can do, as that
    worst path needs one for each return (``levels`` has the proof). Nodes that suit several levels
    go where the fewest values cross. Cost and memory are linear in nodes and edges. With
    ``keep_apart`` or ``connected_only`` the number is not always the least; ``connecting`` tells
    how few connected ones are looked for. Whatever is proposed, ``fuse_partitions`` accepts.

    Args:
        gm: The graph module; not changed.
        is_supported: Whether a node may be fused. Inputs and the output are never asked about. The
            elements of a multi-output node go where it goes.
        groups: Nodes that stay together: all in one partition, or all left out. Where groups
            and unsupported nodes need each other in a circle, the last groups are left out.
        connected_only: Make only partitions whose nodes exchange values, as few as can be found.
        min_nodes: Leave out partitions with fewer computing nodes. ``getitem``, ``get_attr`` and
            ``non_compute_ops`` do not count.
        non_compute_ops: Targets that do not count, as callables or qualified names such as
            ``"torch.ops.aten.view.default"``.
        keep_apart: In each of these sets no two nodes may share a partition.

    Raises:
        RegionError: A group or a set to keep apart names a node that is foreign, erased, repeated
            or also in another group, or that is to be both together and apart.

    Example:
        >>> import torch
        >>> gm = torch.fx.symbolic_trace(lambda x: (x + 1).relu().sin().neg())
        >>> proposal = propose_partitions(gm, lambda node: node.target != "sin")
        >>> proposal.partitions
        ((add, relu), (neg,))
        >>> print(proposal.left_out[next(n for n in gm.graph.nodes if n.name == "sin")].detail)
        sin is not supported
    """
    mend_readers(gm.graph)
    nodes, hazards = legal_order(gm.graph, gm)
    left_out: dict[Node, LeftOut] = {}
    follows = followers(nodes, hazards)
    wanted = _wanted(gm, nodes, is_supported, follows, left_out)
    together = whole_groups(gm, nodes, groups, follows, wanted, left_out)
    check_nodes(gm, keep_apart, nodes, "keep_apart")
    with collector_held():
        items, item_of = grouped_items(nodes, together, follows, wanted, hazards, left_out)
        _keep_apart(items, item_of, keep_apart)
        level = spread(items)
        part = (
            fewest_connected(items, level) if connected_only else [(number, 0) for number in level]
        )
        partitions = _collect(items, part, nodes)
    kept = _large_enough(partitions, min_nodes, non_compute_ops, left_out)
    return Proposal(tuple(kept), {node: left_out[node] for node in nodes if node in left_out})


def predicate(gm: GraphModule, is_supported: Supported) -> Callable[[Node], bool]:
    """Return ``is_supported`` as a predicate on nodes."""
    if isinstance(is_supported, OperatorSupportBase):
        support = is_supported
        # Collected once: torch's partitioner does it again for each node.
        submodules = dict(gm.named_modules())
        return lambda node: support.is_node_supported(submodules, node)
    return is_supported


def _wanted(
    gm: GraphModule,
    nodes: Sequence[Node],
    is_supported: Supported,
    follows: Mapping[Node, Node],
    left_out: dict[Node, LeftOut],
) -> dict[Node, bool]:
    ask = predicate(gm, is_supported)
    wanted: dict[Node, bool] = {}
    for node in nodes:
        if node.op in {"placeholder", "output"}:
            wanted[node] = False
            left_out[node] = LeftOut(Reason.NOT_COMPUTED, f"{node.name} is the graph's {node.op}")
        elif node in follows:
            wanted[node] = wanted[follows[node]]
            if not wanted[node]:
                left_out[node] = follows_left_out(node, follows[node])
        else:
            wanted[node] = _asked(ask, node)
            if not wanted[node]:
                left_out[node] = LeftOut(Reason.NOT_SUPPORTED, f"{node.name} is not supported")
    return wanted


def _asked(ask: Callable[[Node], bool], node: Node) -> bool:
    try:
        return bool(ask(node))
    except Exception as error:
        error.add_note(f"raised by is_supported for node {node.name!r} ({node.target})")
        raise


def _keep_apart(
    items: ItemGraph, item_of: Mapping[Node, int], keep_apart: Sequence[Sequence[Node]]
) -> None:
    for members in keep_apart:
        inside = [node for node in members if items.wanted[item_of[node]]]
        numbers = sorted({item_of[node] for node in inside})
        if len(numbers) != len(inside):
            names = ", ".join(node.name for node in members)
            raise RegionError(
                "keep_apart names nodes that a group, or a tuple's elements, hold together: "
                f"{names}. Take one of them from the set or from the group."
            )
        # Neighbours are enough: each pair puts the later item on a later level, hence all of them
        # apart.
        for first, second in pairwise(numbers):
            keep_items_apart(items, first, second)


def _collect(
    items: ItemGraph, part: Sequence[tuple[int, int]], nodes: Sequence[Node]
) -> list[list[Node]]:
    """Return the nodes of each partition, in the graph's order; ``part`` numbers them by item."""
    found: dict[tuple[int, int], list[Node]] = {}
    for item, members in enumerate(items.nodes):
        if items.wanted[item]:
            found.setdefault(part[item], []).extend(members)
    position = {node: number for number, node in enumerate(nodes)}
    return [sorted(found[key], key=position.__getitem__) for key in sorted(found)]


def _large_enough(
    partitions: Sequence[Sequence[Node]],
    min_nodes: int,
    non_compute_ops: Collection[object],
    left_out: dict[Node, LeftOut],
) -> list[tuple[Node, ...]]:
    kept: list[tuple[Node, ...]] = []
    for partition in partitions:
        size = sum(_computes(node, non_compute_ops) for node in partition)
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


def _computes(node: Node, non_compute_ops: Collection[object]) -> bool:
    if node.op == "get_attr" or is_getitem(node):
        return False
    if not non_compute_ops:
        return True
    return node.target not in non_compute_ops and qualified_name(node) not in non_compute_ops
