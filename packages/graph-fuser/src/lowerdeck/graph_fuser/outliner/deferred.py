"""A graph that is built on demand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, Node

from lowerdeck.graph_fuser.order import value_meta
from lowerdeck.torch_base import add_node, copy_node


@dataclass(frozen=True, slots=True)
class DeferredGraph:
    """What makes one region's graph from that of an equal region; made by ``OutlinePlan.defer``.

    It keeps neither the plan nor the graph that the plan was made for: names and meta are noted,
    and later changes of either do not reach it.

    Attributes:
        like: The graph of an equal region. It must not change.
        names: The name wanted for each node.
        metas: The meta of each node, or of the value that it hands on.
        hands_on: Whether each node only passes a value on, so that metadata of the operation is
            left out.
    """

    like: Graph
    names: tuple[str, ...]
    metas: tuple[Mapping[str, Any], ...]
    hands_on: tuple[bool, ...]

    def build(self) -> Graph:
        """Return a new graph, without an owner."""
        graph = Graph()
        env: dict[Node, Node] = {}
        for node, name, noted, hands_on in zip(
            self.like.nodes, self.names, self.metas, self.hands_on, strict=True
        ):
            meta = value_meta(noted) if hands_on else noted
            if node.op == "placeholder":
                # Its target is what its caller calls it.
                made = env[node] = add_node(
                    graph, "placeholder", name, (), name, type_expr=node.type
                )
                made.meta.update(meta)
            else:
                env[node] = copy_node(graph, node, env, name, meta)
        return graph
