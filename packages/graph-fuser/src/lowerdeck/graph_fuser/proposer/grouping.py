"""Gather nodes that must share a partition: groups, and values with their elements."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from torch.fx import GraphModule, Node

from lowerdeck.graph_fuser.errors import (
    DuplicateNodeError,
    ErasedNodeError,
    ForeignNodeError,
    OverlapError,
    RegionError,
)
from lowerdeck.graph_fuser.order import strong_components
from lowerdeck.graph_fuser.proposer.items import ItemGraph, item_graph
from lowerdeck.graph_fuser.proposer.proposal import LeftOut, Reason

_SINGLY = 16
"""How often one group of a circle is left out alone; then half of them, to stay near linear."""


def check_nodes(
    gm: GraphModule, lists: Sequence[Sequence[Node]], nodes: Sequence[Node], what: str
) -> None:
    """Raise unless ``lists`` name nodes of the graph, none twice in a list."""
    if not lists:
        return
    present = set(nodes)
    for members in lists:
        if isinstance(members, Node):
            raise RegionError(f"{what} holds node {members.name!r}; expected lists of nodes.")
        for node in members:
            if not isinstance(node, Node):
                raise RegionError(
                    f"{what} names {node!r}, which is a {type(node).__name__}; expected nodes."
                )
            if node not in present:
                kind = ErasedNodeError if node.graph is gm.graph else ForeignNodeError
                raise kind(
                    f"{what} names {node.name!r}, which is not in the graph that is to be "
                    "partitioned; collect the lists from this graph, after all edits."
                )
        if len(set(members)) != len(members):
            names = ", ".join(node.name for node in members)
            raise DuplicateNodeError(f"{what} names a node twice in one list: {names}.")


def whole_groups(
    gm: GraphModule,
    nodes: Sequence[Node],
    groups: Sequence[Sequence[Node]],
    follows: Mapping[Node, Node],
    wanted: dict[Node, bool],
    left_out: dict[Node, LeftOut],
) -> list[list[Node]]:
    """Return the groups that may be fused, elements replaced by what they follow."""
    check_nodes(gm, groups, nodes, "groups")
    member: dict[Node, int] = {}
    for number, group in enumerate(groups):
        for node in group:
            if member.setdefault(node, number) != number:
                raise OverlapError(
                    f"Node {node.name!r} is in two groups; a node may be in one. Join the groups."
                )
    kept: list[list[Node]] = []
    for group in _led(groups, follows):
        stranger = next((node for node in group if not wanted[node]), None)
        if stranger is None:
            kept.append(group)
            continue
        for node in group:
            if wanted[node]:
                detail = f"{node.name} is in one group with {stranger.name}, which is left out"
                _drop(node, follows, wanted, left_out, LeftOut(Reason.GROUP_NOT_SUPPORTED, detail))
    return kept


def _led(groups: Sequence[Sequence[Node]], follows: Mapping[Node, Node]) -> list[list[Node]]:
    """Return the groups by the producers of their elements; joined where they meet."""
    above = list(range(len(groups)))

    def root(number: int) -> int:
        while above[number] != number:
            above[number] = above[above[number]]
            number = above[number]
        return number

    group_of: dict[Node, int] = {}
    for number, group in enumerate(groups):
        for node in group:
            # An element goes where its producer goes, so the group holds the producer in its
            # stead.
            while node in follows:
                node = follows[node]  # noqa: PLW2901
            above[root(number)] = root(group_of.setdefault(node, number))
    joined: dict[int, list[Node]] = {}
    for node, number in group_of.items():
        joined.setdefault(root(number), []).append(node)
    return list(joined.values())


def _drop(
    node: Node,
    follows: Mapping[Node, Node],
    wanted: dict[Node, bool],
    left_out: dict[Node, LeftOut],
    why: LeftOut,
) -> None:
    """Leave a node out, and with it those that take its elements."""
    wanted[node] = False
    left_out[node] = why
    work = [node]
    for producer in work:
        for user in producer.users:
            if follows.get(user) is producer and wanted[user]:
                wanted[user] = False
                left_out[user] = follows_left_out(user, producer)
                work.append(user)


def follows_left_out(node: Node, producer: Node) -> LeftOut:
    """Return why an element is left out."""
    detail = f"{node.name} takes an element of {producer.name}, which is left out"
    return LeftOut(Reason.FOLLOWS_PRODUCER, detail)


def grouped_items(
    nodes: Sequence[Node],
    groups: list[list[Node]],
    follows: Mapping[Node, Node],
    wanted: dict[Node, bool],
    hazards: Sequence[tuple[Node, Node]],
    left_out: dict[Node, LeftOut],
) -> tuple[ItemGraph, dict[Node, int]]:
    """Return the items; groups that cannot be one call are left out.

    Args:
        nodes: The graph's nodes in a legal order.
        groups: Nodes that stay together; disjoint.
        follows: The producer of each element.
        wanted: Whether each node may be in a partition; changed for those left out here.
        hazards: Pairs of nodes that must keep their order.
        left_out: Why nodes are left out; added to.
    """
    followed = _of_wanted(follows, wanted)
    item_of, count = _number(nodes, groups, followed)
    # Without groups no circle can be: nothing but its producer comes before an element.
    for attempt in itertools.count():
        if not groups:
            break
        merged, merged_count, offenders = _condense(
            nodes, item_of, count, groups, wanted, hazards, halve=attempt >= _SINGLY
        )
        if not offenders:
            item_of, count = merged, merged_count
            break
        for number in offenders:
            for node in groups[number]:
                detail = f"the group of {node.name} needs its own result through what is left out"
                _drop(node, follows, wanted, left_out, LeftOut(Reason.GROUP_IN_CYCLE, detail))
        groups = [group for number, group in enumerate(groups) if number not in offenders]
        followed = _of_wanted(followed, wanted)
        item_of, count = _number(nodes, groups, followed)
    flags = [False] * count
    for node, item in item_of.items():
        flags[item] = wanted[node]
    return item_graph(nodes, item_of, count, flags, hazards), item_of


def _of_wanted(follows: Mapping[Node, Node], wanted: Mapping[Node, bool]) -> dict[Node, Node]:
    return {node: producer for node, producer in follows.items() if wanted[producer]}


def _number(
    nodes: Sequence[Node], groups: Sequence[Sequence[Node]], follows: Mapping[Node, Node]
) -> tuple[dict[Node, int], int]:
    """Return an item for each node, and how many: one for a group or a producer with elements."""
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
    return item_of, count


def _condense(
    nodes: Sequence[Node],
    item_of: Mapping[Node, int],
    count: int,
    groups: Sequence[Sequence[Node]],
    wanted: Mapping[Node, bool],
    hazards: Sequence[tuple[Node, Node]],
    *,
    halve: bool,
) -> tuple[dict[Node, int], int, set[int]]:
    """Return items without circles and their number, and groups to leave out first if there are.

    Of the groups on a circle through unwanted nodes the last gives way, or the later half, so that
    the answer does not depend on luck.
    """
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
    group_at = {item_of[group[0]]: number for number, group in enumerate(groups)}
    # Items on one circle can only be one call, and only if all of them may be fused.
    component_of = [0] * count
    offenders: set[int] = set()
    components = strong_components(count, after)
    for number, component in enumerate(components):
        for item in component:
            component_of[item] = number
        if len(component) > 1 and not all(flags[item] for item in component):
            on_it = [group_at[item] for item in component if item in group_at]
            offenders.update(on_it[-max(1, len(on_it) // 2 if halve else 1) :])
    return {node: component_of[item] for node, item in item_of.items()}, len(components), offenders
