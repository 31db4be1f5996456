"""Ordering constraints between nodes without a data dependency."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch.fx import Graph, Node

from lowerdeck.graph_fuser.order.elements import is_element
from lowerdeck.torch_base import Behaviours, Effect, MemoryUse

_ORDERED = Effect.WRITES | Effect.RANDOM | Effect.EFFECT | Effect.MODE


def order_hazards(graph: Graph, module: torch.nn.Module | None) -> list[tuple[Node, Node]]:
    """Return (before, after) pairs whose order must be preserved, in O(nodes + edges).

    Random nodes keep their relative order, as do nodes with other side effects. A write stays
    after earlier readers and before later readers of the value and its views; views and getitem
    nodes do not read memory. Mode changes (gradients, autocast) keep their position among calls.
    Assertions may be reordered among each other.

    Args:
        module: Owner of the attributes that the graph reads.
    """
    behaviours = Behaviours(module)
    marked = {
        node: effect
        for node in graph.nodes
        if not behaviours.is_plain(node) and (effect := behaviours.effect(node)) & _ORDERED
    }
    if not marked:
        return []
    nodes = list(graph.nodes)
    pairs: list[tuple[Node, Node]] = []
    for kind in (Effect.RANDOM, Effect.EFFECT):
        chain = [node for node, effect in marked.items() if effect & kind]
        pairs.extend(pairwise(chain))
    if any(effect & Effect.MODE for effect in marked.values()):
        pairs.extend(_modes(nodes, marked))
    if any(effect & Effect.WRITES for effect in marked.values()):
        pairs.extend(_writes(MemoryUse(graph, module), nodes))
    return pairs


def _modes(nodes: Sequence[Node], marked: dict[Node, Effect]) -> list[tuple[Node, Node]]:
    pairs: list[tuple[Node, Node]] = []
    since: list[Node] = []
    last: Node | None = None
    for node in nodes:
        if node.op in {"placeholder", "get_attr", "output"} or is_element(node):
            continue
        # Order each node after the last mode change and before the next: O(nodes) pairs.
        if last is not None:
            pairs.append((last, node))
        if marked.get(node, Effect.NONE) & Effect.MODE:
            pairs.extend((earlier, node) for earlier in since)
            since, last = [], node
        else:
            since.append(node)
    return pairs


def _writes(memory: MemoryUse, nodes: Sequence[Node]) -> list[tuple[Node, Node]]:
    pairs: list[tuple[Node, Node]] = []
    readers: dict[Node, list[Node]] = {}
    writer: dict[Node, Node] = {}
    for node in nodes:
        if node.op in {"placeholder", "get_attr", "output"} or is_element(node):
            continue
        written = memory.writes(node)
        for group in dict.fromkeys((*memory.reads(node), *written)):
            if group in writer:
                pairs.append((writer[group], node))
            # A write follows the readers since the last write; later readers follow this write.
            if group in written:
                pairs.extend((reader, node) for reader in readers.pop(group, ()))
                writer[group] = node
            else:
                readers.setdefault(group, []).append(node)
    return pairs
