"""Trace nodes back through torch's decomposition to the caller's graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram


class Provenance:
    """Map from nodes of a decomposed program to nodes of the caller's program.

    Retracing drops ``node.meta`` (debug handles, partitioner tags), but torch records the original
    graph and node of each new node.
    """

    def __init__(self, exported: ExportedProgram) -> None:
        self._nodes = {
            (id(module.graph), node.name): node
            for module in _graph_modules(exported.graph_module)
            for node in module.graph.nodes
            if node.op == "call_function"
        }
        self._own = {id(node) for node in self._nodes.values()}

    @property
    def nodes(self) -> Iterator[fx.Node]:
        """The caller's call nodes, including those in control flow."""
        return iter(self._nodes.values())

    def source(self, node: fx.Node) -> fx.Node | None:
        """Return the caller's node for ``node``, or None if torch has no record of it."""
        if id(node) in self._own:
            return node
        trail: list[Any] = list(node.meta.get("from_node") or ())
        while trail:
            step = trail.pop()
            original: fx.Node | None = self._nodes.get((step.graph_id, step.name))
            if original is not None:
                return original
            trail.extend(step.from_node or ())
        return None


def _graph_modules(root: torch.nn.Module) -> Iterator[fx.GraphModule]:
    """Yield ``root`` and the graphs of its control flow, without those inside delegates."""
    pending: list[torch.nn.Module] = [root]
    while pending:
        module = pending.pop()
        if isinstance(module, fx.GraphModule):
            yield module
            pending.extend(module.children())
