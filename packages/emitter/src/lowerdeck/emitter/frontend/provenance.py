"""Follow nodes through torch's decomposition back to the caller's own graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram


class Provenance:
    """Finds the node of the caller's program that a decomposed node comes from.

    ``node.meta`` of the caller (debug handles, partitioner tags) does not survive retracing, but
    torch notes from which graph and node each new node comes.
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
        """Return the caller's nodes that call something, those of control flow included."""
        return iter(self._nodes.values())

    def source(self, node: fx.Node) -> fx.Node | None:
        """Return the caller's node for ``node``, or None when torch has lost it."""
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
    """Yield ``root`` and the graphs of its control flow; the insides of delegates stay shut."""
    pending: list[torch.nn.Module] = [root]
    while pending:
        module = pending.pop()
        if isinstance(module, fx.GraphModule):
            yield module
            pending.extend(module.children())
