"""Choose which nodes to fuse: few partitions, provably free of cycles, in linear time."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import TypeAlias

from torch.fx import GraphModule, Node
from torch.fx.passes.operator_support import OperatorSupportBase

from lowerdeck.graph_fuser.collector import collector_held
from lowerdeck.graph_fuser.errors import (
    DuplicateNodeError,
    ErasedNodeError,
    ForeignNodeError,
    OverlapError,
    RegionError,
)
from lowerdeck.graph_fuser.hazards import order_hazards
from lowerdeck.graph_fuser.items import (
    ItemGraph,
    item_graph,
    keep_items_apart,
    strong_components,
)
from lowerdeck.graph_fuser.levels import spread
from lowerdeck.graph_fuser.ordering import legal_order
from lowerdeck.graph_fuser.targets import qualified_name

Supported: TypeAlias = Callable[[Node], bool] | OperatorSupportBase
"""Says whether a node may be fused: a predicate, or torch's operator support."""


class Reason(StrEnum):
    """Why a node stands in no partition."""

    NOT_COMPUTED = "not_computed"
    """It is an input or the output of the graph."""
    NOT_SUPPORTED = "not_supported"
    """``is_supported`` said no."""
    FOLLOWS_PRODUCER = "follows_producer"
    """It takes an element of a value whose producer is left out."""
    GROUP_NOT_SUPPORTED = "group_not_supported"
    """Another node of its group is not supported."""
    GROUP_IN_CYCLE = "group_in_cycle"
    """Its group cannot be one call: a path leaves it through unsupported nodes and returns."""
    TOO_SMALL = "too_small"
    """Its partition would have fewer computing nodes than ``min_nodes``."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Why one node was left out.

    Attributes:
        reason: The kind of reason.
        detail: A sentence for people, naming the node or the number that decided.
    """

    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True)
class Proposal:
    """Partitions that may all be fused together.

    Attributes:
        partitions: The nodes of each partition in the graph's order; partitions in an order in
            which none needs a later one.
        left_out: Why each other node of the graph stands in none.
    """

    partitions: tuple[tuple[Node, ...], ...]
    left_out: Mapping[Node, LeftOut] = field(default_factory=dict)

    def __iter__(self) -> Iterator[tuple[Node, ...]]:
        """Iterate over the partitions."""
        return iter(self.partitions)

    def __len__(self) -> int:
        """Return the number of partitions."""
        return len(self.partitions)

    def named(self, prefix: str = "fused_") -> dict[str, tuple[Node, ...]]:
        """Return the partitions under numbered names, as ``fuse_partitions`` wants them."""
        return {f"{prefix}{number}": nodes for number, nodes in enumerate(self.partitions)}


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
    ``keep_apart`` or ``connected_only`` the number is not always the least.

    Args:
        gm: The graph module; not changed.
        is_supported: Whether a node may be fused. Inputs and the output are never asked about. The
            elements of a multi-output node go where it goes.
        groups: Nodes that stay together: all in one partition, or all left out.
        connected_only: Split partitions whose parts exchange no value.
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
    nodes = legal_order(gm.graph)
    left_out: dict[Node, LeftOut] = {}
    wanted = _wanted(gm, nodes, is_supported, left_out)
    together = _groups(gm, nodes, groups, wanted, left_out)
    _check_nodes(gm, keep_apart, nodes, "keep_apart")
    with collector_held():
        hazards = order_hazards(gm.graph, gm)
        items, item_of = _items(nodes, together, wanted, hazards, left_out)
        _keep_apart(items, item_of, keep_apart)
        level = spread(items)
        part = _connected(items, level) if connected_only else [(number, 0) for number in level]
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
    left_out: dict[Node, LeftOut],
) -> dict[Node, bool]:
    ask = predicate(gm, is_supported)
    wanted: dict[Node, bool] = {}
    follows = _followers(nodes)
    for node in nodes:
        if node.op in {"placeholder", "output"}:
            wanted[node] = False
            left_out[node] = LeftOut(Reason.NOT_COMPUTED, f"{node.name} is the graph's {node.op}")
        elif node in follows:
            wanted[node] = wanted[follows[node]]
            if not wanted[node]:
                left_out[node] = LeftOut(
                    Reason.FOLLOWS_PRODUCER,
                    f"{node.name} takes an element of {follows[node].name}, which is left out",
                )
        else:
            wanted[node] = bool(ask(node))
            if not wanted[node]:
                left_out[node] = LeftOut(Reason.NOT_SUPPORTED, f"{node.name} is not supported")
    return wanted


def _followers(nodes: Sequence[Node]) -> dict[Node, Node]:
    """Return the producer of each node that only takes an element of a tuple."""
    follows: dict[Node, Node] = {}
    for node in nodes:
        users = node.users
        if users and all(_is_getitem(user) and user.args[0] is node for user in users):
            follows.update((user, node) for user in users if len(user.all_input_nodes) == 1)
    return follows


def _is_getitem(node: Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem


def _check_nodes(
    gm: GraphModule, lists: Sequence[Sequence[Node]], nodes: Sequence[Node], what: str
) -> None:
    if not lists:
        return
    present = set(nodes)
    for members in lists:
        for node in members:
            if node not in present:
                kind = ErasedNodeError if node.graph is gm.graph else ForeignNodeError
                raise kind(
                    f"{what} names {node.name!r}, which is not in the graph that is to be "
                    "partitioned; "
                    "collect the lists from this graph, after all edits."
                )
        if len(set(members)) != len(members):
            names = ", ".join(node.name for node in members)
            raise DuplicateNodeError(f"{what} names a node twice in one list: {names}.")


def _groups(
    gm: GraphModule,
    nodes: Sequence[Node],
    groups: Sequence[Sequence[Node]],
    wanted: dict[Node, bool],
    left_out: dict[Node, LeftOut],
) -> list[list[Node]]:
    """Return the groups that may be fused, each with its elements' takers."""
    _check_nodes(gm, groups, nodes, "groups")
    member: dict[Node, int] = {}
    for number, group in enumerate(groups):
        for node in group:
            if member.setdefault(node, number) != number:
                raise OverlapError(
                    f"Node {node.name!r} stands in two groups; a node may stand in one. Join the "
                    "groups."
                )
    kept: list[list[Node]] = []
    for group in _led(groups, _followers(nodes)):
        stranger = next((node for node in group if not wanted[node]), None)
        if stranger is None:
            kept.append(group)
            continue
        for node in group:
            if wanted[node]:
                detail = f"{node.name} is in one group with {stranger.name}, which is left out"
                _drop(node, wanted, left_out, Reason.GROUP_NOT_SUPPORTED, detail)
    return kept


def _led(groups: Sequence[Sequence[Node]], follows: Mapping[Node, Node]) -> list[list[Node]]:
    """Return the groups by the producers of their elements; joined where they meet."""
    joined: list[dict[Node, None]] = []
    home: dict[Node, dict[Node, None]] = {}
    for group in groups:
        members: dict[Node, None] = {}
        for node in group:
            while node in follows:
                node = follows[node]  # noqa: PLW2901
            members[node] = None
        for met in {id(home[node]): home[node] for node in members if node in home}.values():
            members = met | members
            joined = [other for other in joined if other is not met]
        joined.append(members)
        home.update(dict.fromkeys(members, members))
    return [list(members) for members in joined]


def _drop(
    node: Node,
    wanted: dict[Node, bool],
    left_out: dict[Node, LeftOut],
    reason: Reason,
    detail: str,
) -> None:
    """Leave a node out, and with it those that take its elements."""
    wanted[node] = False
    left_out[node] = LeftOut(reason, detail)
    for user, producer in _followers([node]).items():
        if wanted[user]:
            _drop(
                user,
                wanted,
                left_out,
                Reason.FOLLOWS_PRODUCER,
                f"{user.name} takes an element of {producer.name}, which is left out",
            )


def _items(
    nodes: Sequence[Node],
    groups: list[list[Node]],
    wanted: dict[Node, bool],
    hazards: Sequence[tuple[Node, Node]],
    left_out: dict[Node, LeftOut],
) -> tuple[ItemGraph, dict[Node, int]]:
    """Return the items; groups that cannot be one call are left out."""
    follows = {node: producer for node, producer in _followers(nodes).items() if wanted[producer]}
    while True:
        item_of = _number(nodes, groups, follows)
        count = len(set(item_of.values())) if groups else max(item_of.values(), default=-1) + 1
        if not groups:
            flags = [False] * count
            for node, item in item_of.items():
                flags[item] = wanted[node]
            return item_graph(nodes, item_of, count, flags, hazards), item_of
        merged, offender = _condense(nodes, item_of, groups, wanted, hazards)
        if offender is None:
            count = max(merged.values()) + 1
            flags = [False] * count
            for node, item in merged.items():
                flags[item] = wanted[node]
            return item_graph(nodes, merged, count, flags, hazards), merged
        for node in groups[offender]:
            detail = (
                f"the group of {node.name} needs its own result through nodes that are left out"
            )
            _drop(node, wanted, left_out, Reason.GROUP_IN_CYCLE, detail)
        groups = [group for number, group in enumerate(groups) if number != offender]
        follows = {node: producer for node, producer in follows.items() if wanted[producer]}


def _number(
    nodes: Sequence[Node], groups: Sequence[Sequence[Node]], follows: Mapping[Node, Node]
) -> dict[Node, int]:
    """Return an item for each node: one for a group, one for a producer with its elements."""
    item_of: dict[Node, int] = {}
    group_item: dict[int, int] = {}
    group_of = {node: number for number, group in enumerate(groups) for node in group}
    count = 0
    for node in nodes:
        if node in follows:
            item_of[node] = item_of[follows[node]]
            continue
        group = group_of.get(node)
        if group is not None and group in group_item:
            item_of[node] = group_item[group]
            continue
        item_of[node] = count
        if group is not None:
            group_item[group] = count
        count += 1
    return item_of


def _condense(
    nodes: Sequence[Node],
    item_of: Mapping[Node, int],
    groups: Sequence[Sequence[Node]],
    wanted: Mapping[Node, bool],
    hazards: Sequence[tuple[Node, Node]],
) -> tuple[dict[Node, int], int | None]:
    """Return items without circles, or a group that lies on a circle through unwanted nodes."""
    count = max(item_of.values()) + 1
    after: list[list[int]] = [[] for _ in range(count)]
    flags = [False] * count
    for node in nodes:
        item = item_of[node]
        flags[item] = wanted[node]
        for source in node.all_input_nodes:
            if item_of[source] != item:
                after[item_of[source]].append(item)
    for first, second in hazards:
        if item_of[first] != item_of[second]:
            after[item_of[first]].append(item_of[second])
    component_of = [0] * count
    for number, component in enumerate(strong_components(count, after)):
        for item in component:
            component_of[item] = number
        if len(component) > 1 and not all(flags[item] for item in component):
            members = set(component)
            # The last group on the circle gives way, so that the answer does not depend on luck.
            offender = max(
                (number for number, group in enumerate(groups) if item_of[group[0]] in members),
                key=lambda number: item_of[groups[number][0]],
            )
            return {}, offender
    return {node: component_of[item] for node, item in item_of.items()}, None


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
                f"{names}. "
                "Take one of them from the set or from the group."
            )
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
    place = {node: number for number, node in enumerate(nodes)}
    return [sorted(found[key], key=place.__getitem__) for key in sorted(found)]


def _connected(items: ItemGraph, level: Sequence[int]) -> list[tuple[int, int]]:
    """Return for each item its level, and a number for the part of that level that holds it."""
    part = [-1] * len(level)
    for start in range(len(level)):
        if part[start] >= 0 or not items.wanted[start]:
            continue
        part[start] = start
        work = [start]
        while work:
            item = work.pop()
            # Pairs that must keep their order count too: they could tie two parts into a circle.
            for other in (*items.before[item], *items.after[item]):
                if part[other] < 0 and items.wanted[other] and level[other] == level[item]:
                    part[other] = start
                    work.append(other)
    return list(zip(level, part, strict=True))


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
    if node.op == "get_attr" or _is_getitem(node):
        return False
    if not non_compute_ops:
        return True
    return node.target not in non_compute_ops and qualified_name(node) not in non_compute_ops
