"""Pairs of nodes whose order matters though no value flows from one to the other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch.fx import Graph, Node

from lowerdeck.graph_fuser.callees import Effect
from lowerdeck.graph_fuser.effects import Behaviours

_ORDERED = Effect.WRITES | Effect.RANDOM | Effect.EFFECT | Effect.MODE


def order_hazards(graph: Graph, module: torch.nn.Module | None) -> list[tuple[Node, Node]]:
    """Return pairs (before, after) that must keep their order: O(nodes + edges).

    Random nodes keep their order among each other, so do nodes with other effects. A node that
    writes a value stays behind earlier readers of it and before later ones, through views too. A
    change of mode (gradients, autocast) keeps its place among all nodes. Checks may pass each
    other.

    Args:
        graph: The graph, in a legal order.
        module: The module that holds what the graph's nodes name.
    """
    behaviours = Behaviours(module)
    marked = {
        node: effect
        for node in graph.nodes
        if not behaviours.is_plain(node) and (effect := behaviours.effect(node)) & _ORDERED
    }
    if not marked:
        return []
    pairs: list[tuple[Node, Node]] = []
    for kind in (Effect.RANDOM, Effect.EFFECT):
        chain = [node for node, effect in marked.items() if effect & kind]
        pairs.extend(pairwise(chain))
    if any(effect & Effect.MODE for effect in marked.values()):
        pairs.extend(_modes(graph, marked))
    if any(effect & Effect.WRITES for effect in marked.values()):
        pairs.extend(_writes(graph, behaviours))
    return pairs


def _modes(graph: Graph, marked: dict[Node, Effect]) -> list[tuple[Node, Node]]:
    pairs: list[tuple[Node, Node]] = []
    since: list[Node] = []
    last: Node | None = None
    for node in graph.nodes:
        if node.op in {"placeholder", "get_attr", "output"}:
            continue
        if last is not None:
            pairs.append((last, node))
        if marked.get(node, Effect.NONE) & Effect.MODE:
            pairs.extend((earlier, node) for earlier in since)
            since, last = [], node
        else:
            since.append(node)
    return pairs


class _Memory:
    """Which nodes may share memory: sets that are joined as the graph is walked."""

    def __init__(self) -> None:
        self._parent: dict[Node, Node] = {}

    def find(self, node: Node) -> Node:
        root = node
        while (above := self._parent.get(root, root)) is not root:
            root = above
        while node is not root:
            node, self._parent[node] = self._parent.get(node, node), root
        return root

    def join(self, node: Node, other: Node) -> None:
        self._parent[self.find(node)] = self.find(other)


def _writes(graph: Graph, behaviours: Behaviours) -> list[tuple[Node, Node]]:
    memory = _memory(graph, behaviours)
    pairs: list[tuple[Node, Node]] = []
    readers: dict[Node, list[Node]] = {}
    writer: dict[Node, Node] = {}
    for node in graph.nodes:
        if node.op in {"placeholder", "get_attr", "output"}:
            continue
        written = {memory.find(source) for source in _written(node, behaviours)}
        for root in dict.fromkeys(memory.find(source) for source in node.all_input_nodes):
            if root in writer:
                pairs.append((writer[root], node))
            if root in written:
                pairs.extend((reader, node) for reader in readers.pop(root, ()))
                writer[root] = node
            else:
                readers.setdefault(root, []).append(node)
    return pairs


def _memory(graph: Graph, behaviours: Behaviours) -> _Memory:
    memory = _Memory()
    read: dict[object, Node] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            first = read.setdefault(node.target, node)
            if first is not node:
                memory.join(node, first)
        elif behaviours.of(node).aliases:
            for source in node.all_input_nodes:
                memory.join(node, source)
    return memory


def _written(node: Node, behaviours: Behaviours) -> Sequence[Node]:
    behaviour = behaviours.of(node)
    if not behaviour.effect & Effect.WRITES:
        return ()
    if not behaviour.writes:
        return node.all_input_nodes
    found: list[Node] = []
    for place, name in behaviour.writes:
        argument = node.args[place] if 0 <= place < len(node.args) else node.kwargs.get(name)
        if isinstance(argument, Node):
            found.append(argument)
        elif isinstance(argument, (list, tuple)):
            found.extend(item for item in argument if isinstance(item, Node))
    # A keyword under another name than the table's: be careful rather than wrong.
    return found or node.all_input_nodes
