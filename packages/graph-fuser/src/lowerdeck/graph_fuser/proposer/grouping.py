"""Items: nodes that must share a partition (groups, producers with their getitem nodes)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch.fx import Node

from lowerdeck.graph_fuser.errors import RegionError
from lowerdeck.graph_fuser.order import followers, strong_components
from lowerdeck.graph_fuser.proposer.items import ItemGraph, item_graph
from lowerdeck.graph_fuser.proposer.proposal import LeftOut, Reason


class Candidates:
    """Nodes that may be partitioned, and the reasons for the others.

    Args:
        nodes: The graph's nodes in topological order.
        hazards: Node pairs whose order must be preserved.
        is_supported: Whether a node may be fused; not called for inputs, the output, or getitem of
            a multi-output node, which follows its producer.

    Attributes:
        wanted: Whether each node may be in a partition.
        left_out: Reason for each excluded node.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        hazards: Sequence[tuple[Node, Node]],
        is_supported: Callable[[Node], bool],
    ) -> None:
        self.nodes = nodes
        self.hazards = hazards
        self.follows: dict[Node, Node] = followers(nodes, hazards)
        self.wanted: dict[Node, bool] = dict.fromkeys(nodes, True)
        self.left_out: dict[Node, LeftOut] = {}
        for node in nodes:
            if node.op in {"placeholder", "output"}:
                self.drop(node, Reason.NOT_COMPUTED, f"{node.name} is the graph's {node.op}")
            elif node not in self.follows and not _call_predicate(is_supported, node):
                self.drop(node, Reason.NOT_SUPPORTED, f"{node.name} is not supported")

    def drop(self, node: Node, reason: Reason, detail: str) -> None:
        """Exclude a node and its getitem nodes."""
        # getitem nodes follow their producer.
        self.wanted[node] = False
        self.left_out[node] = LeftOut(reason, detail)
        for user in node.users:
            if self.follows.get(user) is node and self.wanted[user]:
                detail = f"{user.name} is a getitem of {node.name}, which is left out"
                self.drop(user, Reason.FOLLOWS_PRODUCER, detail)

    def items(self, groups: Sequence[Sequence[Node]]) -> ItemGraph:
        """Return the items; drop groups that cannot become one call.

        Args:
            groups: Nodes that must share a partition; overlapping groups are merged.

        Raises:
            RegionError: A group contains anything but nodes of the graph.
        """
        kept = [group for group in self._joined(groups) if self._is_supported(group)]
        # Few rounds: each drops half of the groups on a cycle.
        while True:
            item_of, count = self._numbered(kept)
            if not kept:  # a getitem has no predecessor but its producer: no cycle
                break
            components = self._components(item_of, count)
            cyclic = self._cyclic_groups(kept, item_of, components)
            if not cyclic:
                # Merge items of one strongly connected component.
                place = {item: i for i, component in enumerate(components) for item in component}
                item_of = {node: place[item] for node, item in item_of.items()}
                count = len(components)
                break
            for number in cyclic:
                for node in kept[number]:
                    detail = (
                        f"the group of {node.name} depends on itself through nodes that are left "
                        "out"
                    )
                    self.drop(node, Reason.GROUP_IN_CYCLE, detail)
            kept = [group for number, group in enumerate(kept) if number not in cyclic]
        return item_graph(self.nodes, item_of, count, self.wanted, self.hazards)

    def _joined(self, groups: Sequence[Sequence[Node]]) -> list[list[Node]]:
        """Replace getitem nodes by their producers and merge overlapping groups."""
        # Union-find with path halving.
        above = list(range(len(groups)))

        def root(number: int) -> int:
            while above[number] != number:
                above[number] = above[above[number]]
                number = above[number]
            return number

        group_of: dict[Node, int] = {}
        for number, group in enumerate(groups):
            if isinstance(group, Node):
                raise RegionError(f"groups holds node {group.name!r}; expected lists of nodes.")
            for node in group:
                if node not in self.wanted:
                    raise RegionError(
                        f"found {node!r} in groups; expected nodes of the graph that is to be "
                        "partitioned. Collect the groups after all edits."
                    )
                while node in self.follows:
                    node = self.follows[node]  # noqa: PLW2901
                above[root(number)] = root(group_of.setdefault(node, number))
        joined: dict[int, list[Node]] = {}
        for node, number in group_of.items():
            joined.setdefault(root(number), []).append(node)
        return list(joined.values())

    def _is_supported(self, group: Sequence[Node]) -> bool:
        """Return whether a group may be fused; otherwise exclude it."""
        stranger = next((node for node in group if not self.wanted[node]), None)
        for node in group if stranger is not None else ():
            if self.wanted[node]:
                detail = f"{node.name} is in one group with {stranger}, which is left out"
                self.drop(node, Reason.GROUP_NOT_SUPPORTED, detail)
        return stranger is None

    def _numbered(self, groups: Sequence[Sequence[Node]]) -> tuple[dict[Node, int], int]:
        """Return the item of each node, and the number of items."""
        leader = {node: group[0] for group in groups for node in group}
        number_of: dict[Node, int] = {}
        item_of: dict[Node, int] = {}
        for node in self.nodes:
            producer = self.follows.get(node)
            if producer is not None and self.wanted[producer]:
                item_of[node] = item_of[producer]
            else:
                item_of[node] = number_of.setdefault(leader.get(node, node), len(number_of))
        return item_of, len(number_of)

    def _components(self, item_of: Mapping[Node, int], count: int) -> list[list[int]]:
        """Return the strongly connected components of items, in topological order."""
        after: list[list[int]] = [[] for _ in range(count)]
        reads = [(source, node) for node in self.nodes for source in node.all_input_nodes]
        for first, second in (*reads, *self.hazards):
            if item_of[first] != item_of[second]:
                after[item_of[first]].append(item_of[second])
        return strong_components(count, after)

    def _cyclic_groups(
        self,
        groups: Sequence[Sequence[Node]],
        item_of: Mapping[Node, int],
        components: Sequence[Sequence[int]],
    ) -> set[int]:
        """Return groups to drop: the later half of those on a cycle with unwanted nodes.

        Halving bounds the number of rounds by the logarithm of the number of groups.
        """
        group_at = {item_of[group[0]]: number for number, group in enumerate(groups)}
        unwanted = {item for node, item in item_of.items() if not self.wanted[node]}
        chosen: set[int] = set()
        for component in components:
            if len(component) > 1 and not unwanted.isdisjoint(component):
                on_cycle = [group_at[item] for item in component if item in group_at]
                chosen.update(on_cycle[len(on_cycle) // 2 :])
        return chosen


def _call_predicate(is_supported: Callable[[Node], bool], node: Node) -> bool:
    try:
        return bool(is_supported(node))
    except Exception as error:
        error.add_note(f"raised by is_supported for node {node.name!r} ({node.target})")
        raise
