"""Gather nodes that must share a partition: groups, and values with their elements."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

from torch.fx import GraphModule, Node

from lowerdeck.graph_fuser.components import strong_components
from lowerdeck.graph_fuser.errors import (
    DuplicateNodeError,
    ErasedNodeError,
    ForeignNodeError,
    OverlapError,
    RegionError,
)
from lowerdeck.graph_fuser.items import ItemGraph, item_graph
from lowerdeck.graph_fuser.proposal import LeftOut, Reason


def followers(nodes: Sequence[Node]) -> dict[Node, Node]:
    """Return the producer of each node that only takes an element of a tuple."""
    follows: dict[Node, Node] = {}
    for node in nodes:
        users = node.users
        if users and all(is_getitem(user) and user.args[0] is node for user in users):
            follows.update((user, node) for user in users if len(user.all_input_nodes) == 1)
    return follows


def is_getitem(node: Node) -> bool:
    """Return whether ``node`` takes an element of a value."""
    return node.op == "call_function" and node.target is operator.getitem


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
    wanted: dict[Node, bool],
    left_out: dict[Node, LeftOut],
) -> list[list[Node]]:
    """Return the groups that may be fused, each with its elements' takers."""
    check_nodes(gm, groups, nodes, "groups")
    member: dict[Node, int] = {}
    for number, group in enumerate(groups):
        for node in group:
            if member.setdefault(node, number) != number:
                raise OverlapError(
                    f"Node {node.name!r} stands in two groups; a node may stand in one. Join the "
                    "groups."
                )
    kept: list[list[Node]] = []
    for group in _led(groups, followers(nodes)):
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
    for user, producer in followers([node]).items():
        if wanted[user]:
            _drop(
                user,
                wanted,
                left_out,
                Reason.FOLLOWS_PRODUCER,
                f"{user.name} takes an element of {producer.name}, which is left out",
            )


def grouped_items(
    nodes: Sequence[Node],
    groups: list[list[Node]],
    wanted: dict[Node, bool],
    hazards: Sequence[tuple[Node, Node]],
    left_out: dict[Node, LeftOut],
) -> tuple[ItemGraph, dict[Node, int]]:
    """Return the items; groups that cannot be one call are left out."""
    follows = {node: producer for node, producer in followers(nodes).items() if wanted[producer]}
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
